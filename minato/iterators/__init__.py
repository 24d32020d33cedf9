"""What stands behind ``iter(loader)``: one iterator a kind of scheduling."""
