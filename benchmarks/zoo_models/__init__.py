"""Every causal language model of transformers, tiny and random: building it, running it packed, and reporting."""
