"""A policy-gradient step of a real language model, run eagerly, with inductor, and with the dualkv backend."""
