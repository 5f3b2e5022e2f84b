"""``python -m monai_gds``."""

from monai_gds.command.main import main

if __name__ == "__main__":
    main()
