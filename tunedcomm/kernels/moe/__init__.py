"""ep_dispatch and ep_combine: tokens to the ranks of their experts, and the experts' results back."""
