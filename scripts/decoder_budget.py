"""Compute how many requests a decoder can serve at a time with keys and values on a device, and in host memory.

    python scripts/decoder_budget.py [--host 64] [--tokens 1024] [-o docs/data]

The sizes are those of published decoders in half precision; nothing is measured. On the device are the weights, and for
each request the values of one token in one layer and its logits. Its keys and values are there too, or in host memory,
once: an iteration appends to them in place. That favours the device: an exported model with past and present as inputs
and outputs needs both of them.
``-o`` writes the results ``decoders-budget``.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from command_arguments import add_output
from page_markers import markdown_table
from result_files import write_results

#: Bytes of an element.
ITEM = 2
GB = 1e9
HEAD = ("decoder", "weights", "K/V of a request", "device", "all on the device", "K/V in host memory")


@dataclass(frozen=True, slots=True)
class Decoder:
    """The sizes of a decoder; those of a model like GPT-2 without ``gated``, of one like Llama with it."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    #: The width between the dense layers of a block.
    inner: int
    vocabulary: int
    #: Three dense layers in a block, no biases, and normalisations without a shift.
    gated: bool
    #: Rows of a table of positions.
    positions: int = 0
    #: The table of tokens also computes the logits.
    tied: bool = True
    #: Device memory for which the batch is computed, in GB.
    devices: tuple[float, ...] = (8, 24)

    @property
    def weights(self) -> int:
        """The number of weights."""
        hidden, kv = self.hidden, self.kv_heads * self.hidden // self.heads
        attention, dense = 2 * hidden * (hidden + kv), (3 if self.gated else 2) * hidden * self.inner
        shifts = 0 if self.gated else 2 * hidden + 2 * kv + self.inner + hidden
        normalisation = hidden if self.gated else 2 * hidden
        tables = (self.vocabulary * (1 if self.tied else 2) + self.positions) * hidden
        return tables + self.layers * (attention + dense + shifts + 2 * normalisation) + normalisation

    @property
    def slot_bytes(self) -> int:
        """The bytes of the keys and values of one token."""
        return 2 * self.layers * self.kv_heads * (self.hidden // self.heads) * ITEM

    @property
    def token_bytes(self) -> int:
        """The bytes of the values of one token in one layer, and of its logits."""
        return (self.vocabulary + 3 * self.inner + 6 * self.hidden) * ITEM

    def requests(self, device: float, tokens: int, host: float) -> tuple[int, int]:
        """Return how many requests fit: with keys and values on the device, and on the host.

        Args:
            device: Memory of the device in bytes.
            tokens: The tokens of a request.
            host: Host memory for keys and values in bytes.
        """
        free, cache = device - self.weights * ITEM, self.slot_bytes * tokens
        fit = [int(max(free, 0) // size) for size in (cache + self.token_bytes, self.token_bytes)]
        return fit[0], min(fit[1], int(host // cache))


#: Sizes from the configurations that are published with the weights.
DECODERS = (
    Decoder("GPT-2", 12, 768, 12, 12, 3072, 50_257, gated=False, positions=1024, devices=(1, 8)),
    Decoder("GPT-2 XL", 48, 1600, 25, 25, 6400, 50_257, gated=False, positions=1024, devices=(4, 8)),
    Decoder("Llama 3.2 1B", 16, 2048, 32, 8, 8192, 128_256, gated=True, devices=(4, 8)),
    Decoder("Llama 2 7B", 32, 4096, 32, 32, 11_008, 32_000, gated=True, tied=False, devices=(16, 24)),
    Decoder("Llama 3 8B", 32, 4096, 32, 8, 14_336, 128_256, gated=True, tied=False, devices=(18, 24)),
)


def table(tokens: int, host_gb: float) -> str:
    """Return the table in Markdown."""
    rows: list[tuple[str, ...]] = [HEAD]
    for decoder in DECODERS:
        for device in decoder.devices:
            own, other = decoder.requests(device * GB, tokens, host_gb * GB)
            cache = f"{decoder.slot_bytes * tokens / 1e6:.0f} MB"
            weights = f"{decoder.weights * ITEM / GB:.2f} GB"
            rows.append((decoder.name, weights, cache, f"{device:g} GB", str(own), str(other)))
    return markdown_table(rows)


def main() -> None:
    """Print the table and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", type=float, default=64, help="host memory for keys and values in GB (default: 64)")
    parser.add_argument("--tokens", type=int, default=1024, help="tokens of a request (default: 1024)")
    add_output(parser)
    arguments = parser.parse_args()
    about = (
        f"Computed by `scripts/decoder_budget.py`, not measured: the most requests of {arguments.tokens} tokens, in "
        f"half precision. K/V: keys and values, with {arguments.host:g} GB of host memory. They count once, as if an "
        "iteration appended to them in place; with both `past` and `present` of an exported model on the device, about "
        "half as many requests fit on it."
    )
    found = table(arguments.tokens, arguments.host)
    print(found)
    write_results(arguments.output, {"decoders-budget": f"{about}\n\n{found}"})


if __name__ == "__main__":
    main()
