"""Layer 6: executes step plans on a device. Has no access to the queue."""
