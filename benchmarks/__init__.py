"""deltune beside PEFT and AdapterHub: `make bench`, or `python -m benchmarks --help`."""
