"""Big-number kernels for CUDA, and what runs them: sources (``*.cuh``), shapes, plans and devices."""
