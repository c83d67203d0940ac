"""Variants of all_reduce, reduce_scatter and all_gather whose payloads travel quantised (`common.wire`)."""
