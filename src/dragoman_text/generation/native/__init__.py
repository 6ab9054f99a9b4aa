"""The decoder step of Llama and similar models in machine code, for AVX2 or AVX-512: see docs/why/decoder-step.md."""
