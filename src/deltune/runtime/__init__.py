"""A delta on a live model: attach, use, mix, save, merge and detach.

Where to begin reading, from what a user calls to what a pass does:

- `attach` puts a method or a saved delta on a model and returns a `handle` (`Tuned`), a façade over `attached`, which
  knows all deltas of one model, which of them is in use, and the hooks.
- `modules` has what is attached: a `Delta` holds an `Edit` for each place at which a modification of its method acts. A
  `Modification` (methods/spec) says what; on a model it is a `ResolvedEdit` (methods/resolve) at a `Location`
  (methods/sites); attached it is an `Edit`. While it computes it reads a `Place` (methods/forms/base): the module's
  weight, bias and rows of this one call.
- A forward pass: `pass_manager` opens it and takes the lock, `forward_pass` is its state, `row_assignment` says which
  edits act on which rows, `model_state` puts tensors in, `hooks` apply the edits; `rows` and `stacked_edits` compute
  several deltas in one batch, `attention` and `prompts` do what no hook on a linear can.
- Whole deltas: `serialization` and `delta_schema` (files), `merging`, `combine`, `extract`, `hub`, `model_card`.
- Beside these: `causal_loss`, `pooling`, `padding`, `linear`, `sharding`, `offloading`, `scheduling`, `statistics`.
"""
