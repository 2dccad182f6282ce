"""Parts of `policy_update.py`."""
