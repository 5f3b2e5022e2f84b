"""The benchmarks behind ``monai-gds bench``. They use the public API only, never a backend's internals."""
