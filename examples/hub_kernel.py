"""Assemble the Triton kernels of relative attention as a folder that huggingface's `kernels` library loads.

    python examples/hub_kernel.py --output build/kernel

It has one build, `torch-universal`, for every PyTorch and Python, and requires neither the package nor transformers:
the package's file of the kernels is copied, and of the modules that it imports the definitions that it needs.
"""

import argparse
import ast
import hashlib
import json
import re
import shutil
from pathlib import Path

SOURCES = Path(__file__).parents[1] / "src" / "txl_hf"
KERNELS, ATTENTION = "kernels/attention_triton.py", "transfo_xl/attention_transfo_xl.py"
NAMES = "WITHOUT_AUTOCAST AttentionInputs Backend first_repeated hidden_keys working_dtype"
USED = {"kernels/operators.py": ["is_transformed"], ATTENTION: NAMES.split()}
INIT = '''"""Attention with relative positions (Transformer-XL, arXiv:1901.02860) without L x K scores in memory."""

from .kernels import attention_triton as _
from .transfo_xl.attention_transfo_xl import BACKENDS, AttentionInputs


def relative_attention(query, key, value, rel_key=None, content_bias=None, position_bias=None, **options):
    """Attended values (B, H, L, Dh), or a ValueError that names what the kernels cannot compute.

    Args:
        query: (B, H, L, Dh), fp16, bf16 or fp32, Dh at most 128, on a GPU of compute capability 8.0 or newer.
        key, value: (B, H, K, Dh), K >= L; the queries are the last L of the K keys' positions.
        rel_key: (H, n, Dh), W_R R from distance n - 1 to 0, or with `future` n - 1 - future to -future.
        content_bias, position_bias: (H, Dh), u and v.
        options: scaling (Dh ** -0.5); dropout; rel_bias (H, n), a score per distance; key_mask (B, K) bool, False for
            padding; window, the furthest distance seen; future, how many keys after itself a query sees (causal);
            first_key (B, L) int, where its document begins; hidden (B or 1, 1, L, K) bool, with future: keys not seen.
    """
    positions = {"rel_key": rel_key, "content_bias": content_bias, "position_bias": position_bias}
    inputs = AttentionInputs(query, key, value, **{"scaling": query.shape[-1] ** -0.5} | positions | options)
    if reason := BACKENDS["txl_triton"].refusal(inputs):
        raise ValueError(f"relative_attention cannot be computed: {reason}")
    return BACKENDS["txl_triton"].run(inputs)[0]
'''


def definitions(path: str, names: list[str]) -> str:
    """The definitions of these names in a module, and those of its imports that they read."""
    source, imports, found = (SOURCES / path).read_text(encoding="utf-8"), [], []
    for node in ast.parse(source).body:
        first = min(part.lineno for part in [node, *getattr(node, "decorator_list", [])])
        text = "\n".join(source.splitlines()[first - 1 : node.end_lineno])
        defined = {getattr(node, "name", ""), *(getattr(target, "id", "") for target in getattr(node, "targets", ()))}
        if defined & {*names}:
            found.append(text)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            imports.append((text, {alias.asname or alias.name for alias in node.names}))
    read = {*re.findall(r"\w+", "\n".join(found))}
    return "\n\n\n".join(["\n".join(text for text, known in imports if known & read), *found]) + "\n"


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("build/kernel"), help="(%(default)s)")
    build = parser.parse_args(given).output / "build" / "torch-universal"
    files = {"__init__.py": INIT, KERNELS: (SOURCES / KERNELS).read_text(encoding="utf-8")}
    files |= {f"{folder}/__init__.py": "" for folder in ("kernels", "transfo_xl")}
    files |= {path: definitions(path, names) for path, names in USED.items()}
    files[ATTENTION] += "\n\nBACKENDS = {}\n\n\ndef register(backend):\n    BACKENDS[backend.name] = backend\n"
    number = hashlib.sha256("".join(files.values()).encode()).hexdigest()[:10]
    # The id is the name of the imported module and of its operators: several versions can be in one process.
    metadata = {"id": f"_txl_attention_{number}", "name": "txl-attention", "version": 1, "license": "Apache-2.0"}
    files["metadata.json"] = json.dumps(metadata | {"python-depends": [], "backend": {"type": "cuda"}}, indent=2)
    shutil.rmtree(build, ignore_errors=True)
    for name, text in files.items():
        (build / name).parent.mkdir(parents=True, exist_ok=True)
        (build / name).write_text(text, encoding="utf-8")
    print(f"{metadata['id']}: {build}")


if __name__ == "__main__":
    main()
