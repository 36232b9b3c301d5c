#!/usr/bin/env python3
"""Compares the GPU machine code of two builds, function by function.

    tools/machine_code.py OLD NEW [PATTERN]

OLD and NEW are objects, libraries or programs with CUDA code for one architecture; PATTERN, a regular expression,
chooses functions by their mangled names. Prints each function of both whose instructions differ and how many it has,
then one line of counts; exits 1 if any differ or none were compared, 2 if a file or cuobjdump fails. For changes that
are to leave kernels as they are: what is the same needs no card to be tested and timed again.

Needs cuobjdump and nvdisasm in PATH: of a CUDA toolkit, or of PyPI's nvidia-cuda-cuobjdump and nvidia-cuda-nvdisasm.
"""

import hashlib
import re
import shutil
import subprocess
import sys


def code_of(path):
    """{function: (hash of its instructions, how many)}, names without what names the file they were made from."""
    listing = subprocess.run(["cuobjdump", "-sass", path], capture_output=True, text=True)
    if listing.returncode != 0:
        fail(f"{path}: {listing.stderr.strip() or listing.stdout.strip() or 'cuobjdump failed'}")
    functions, instructions = {}, None
    for line in listing.stdout.splitlines():
        if name := re.search(r"Function : (\S+)", line):
            plain = re.sub(r"\d+_GLOBAL__N__.*?_\d{4,}(?=\d)", "", name[1])
            instructions = functions.setdefault(plain, [])
        elif (found := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(.*?);?\s+/\*", line)) and instructions is not None:
            instructions.append(found[1])
    if not functions:
        fail(f"{path}: has no GPU machine code")
    return {f: (hashlib.sha256("\n".join(i).encode()).hexdigest(), len(i)) for f, i in functions.items()}


def fail(message):
    print(f"machine_code.py: {message}", file=sys.stderr)
    sys.exit(2)


def main():
    if len(sys.argv) not in (3, 4):
        fail("expected OLD NEW [PATTERN]")
    for tool in ("cuobjdump", "nvdisasm"):
        if shutil.which(tool) is None:
            fail(f"no {tool} in PATH; it is in the CUDA toolkit and on PyPI (nvidia-cuda-{tool})")
    pattern = re.compile(sys.argv[3] if len(sys.argv) == 4 else "")
    old, new = ({f: c for f, c in code_of(path).items() if pattern.search(f)} for path in sys.argv[1:3])
    both = sorted(old.keys() & new.keys())
    differ = [f for f in both if old[f] != new[f]]
    for function in differ:
        print(f"differs: {function}: {old[function][1]} and {new[function][1]} instructions")
    only_old, only_new = len(old.keys() - new.keys()), len(new.keys() - old.keys())
    print(f"{len(both) - len(differ)} functions are the same, {len(differ)} differ; "
          f"{only_old} are in {sys.argv[1]} alone, {only_new} in {sys.argv[2]} alone")
    sys.exit(1 if differ or not both else 0)


if __name__ == "__main__":
    main()
