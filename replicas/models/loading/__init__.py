"""Models from where they are (a directory, the hub, a GGUF file), or planted, onto a device."""
