"""Tables of ratios between kvformat, bare memory and disk operations, and other dataset libraries."""
