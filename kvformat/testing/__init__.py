"""The conformance kit: what tests of storage, writers and readers need, for users of the library too."""
