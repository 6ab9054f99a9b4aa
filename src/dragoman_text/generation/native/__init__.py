"""The decoder step of Llama and similar models by our kernels in C: see docs/why/kernels.md."""
