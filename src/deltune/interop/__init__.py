"""Reading and writing the adapter files of other libraries."""
