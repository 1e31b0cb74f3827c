"""Writes docs/layers.md from the complete proof: ``python tests/write_layer_table.py``.

It takes a quarter of an hour on two cores.
"""

from test_transparency import COMPLETE, TABLE, Proof, table

if __name__ == "__main__":
    TABLE.parent.mkdir(exist_ok=True)
    TABLE.write_text(table(Proof(COMPLETE, timeout=7200)))
    print(f"wrote {TABLE}")
