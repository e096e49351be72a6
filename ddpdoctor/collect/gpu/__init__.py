"""Facts about GPUs, from the driver, the PCI bus and the kernel's log."""
