"""What ``monai-gds bench``, ``profile`` and ``demo`` measure, by the public API, not by a backend's internals."""
