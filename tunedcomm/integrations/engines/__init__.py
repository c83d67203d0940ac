"""tunedcomm inside serving engines: `tunedcomm_plugin` imports this when an engine makes its first process group."""
