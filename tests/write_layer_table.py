"""Writes docs/layers.md from the transparency proof: ``python tests/write_layer_table.py``."""

from test_transparency import TABLE, table

if __name__ == "__main__":
    TABLE.parent.mkdir(exist_ok=True)
    TABLE.write_text(table())
    print(f"wrote {TABLE}")
