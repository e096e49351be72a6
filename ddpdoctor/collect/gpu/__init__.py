"""GPUs: what the driver, the PCI bus and the kernel's log say of them."""
