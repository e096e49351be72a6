"""ddpdoctor: diagnoses distributed PyTorch training. Importing this package costs nothing."""

__version__ = "0.1.0"
