"""``python -m monai_gds``."""

from monai_gds.cli import main

if __name__ == "__main__":
    main()
