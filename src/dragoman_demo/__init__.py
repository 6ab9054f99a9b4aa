"""A few small models and a language model to try: `dragoman demo`."""
