"""Parts of the intra-operator solver; :mod:`planner.search.intra_op` joins them."""
