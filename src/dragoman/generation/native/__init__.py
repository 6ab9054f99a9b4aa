"""The decoder step in machine code, for Llama and similar models on CPUs with AVX-512: see docs/why/decoder-step.md."""
