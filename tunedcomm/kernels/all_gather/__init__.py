"""all_gather: its op and its variants, one file each."""
