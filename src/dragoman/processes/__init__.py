"""Processes that accept connections and answer requests with copies of the models (`--processes`)."""
