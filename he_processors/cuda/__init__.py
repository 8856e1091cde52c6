"""CUDA kernels of big numbers and of points, and what runs them: sources (``*.cuh``), shapes, plans and devices."""
