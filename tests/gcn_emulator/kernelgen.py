"""Random small Triton kernels. Float inputs are multiples of 1/4 in a small range, so that sums and
products are exact and neither contraction nor summation order can change a comparison."""

import random
from dataclasses import dataclass, field

from kernelgen_expressions import final_float, float_expr, int_expr

HEADER = "import triton\nimport triton.language as tl\n\n\n"


@dataclass
class Case:
    name: str
    source: str
    args: list  # (dtype, number of elements, low, high) for tensors, or an int
    outputs: list  # indices of args to compare
    grid: tuple = (1,)
    consts: dict = field(default_factory=dict)
    options: dict = field(default_factory=dict)
    tolerance: float = 1e-5


def kernel(name, params, body):
    lines = "\n".join("    " + line for line in body)
    return f"@triton.jit\ndef {name}({', '.join(params)}):\n{lines}\n"


DTYPES = {
    "i32": "tl.int32",
    "f32": "tl.float32",
    "f16": "tl.float16",
    "bf16": "tl.bfloat16",
    "i16": "tl.int16",
    "i8": "tl.int8",
    "i64": "tl.int64",
}


def span(dtype):
    return {"bf16": (-4, 4), "f16": (-4, 4), "f32": (-8, 8), "i8": (-100, 100)}.get(
        dtype, (-1000, 1000)
    )


def warps(r):
    return {"num_warps": r.choice([1, 2, 4, 8])}


def elementwise(r, name):
    dtype = r.choice(["i32", "i32", "f32", "f32", "f16", "bf16", "i16", "i8", "i64"])
    block = r.choice([64, 128, 256, 512, 1024])
    n = r.randint(block // 2, 3 * block)
    real = dtype in ("f32", "f16", "bf16")
    load = ".to(tl.float32)" if real else ".to(tl.int32)" if dtype in ("i16", "i8") else ""
    body = ["o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)", "m = o < N"]
    body += [
        f"{v} = tl.load({p} + o, mask=m, other={r.choice([0, 1])}){load}"
        for v, p in (("a", "X"), ("b", "Y"))
    ]
    if real:
        e = final_float(r, float_expr(r, r.randint(1, 3), ["a", "b"]))
    else:
        e = int_expr(r, r.randint(1, 4), ["a", "b"])
    body.append(f"z = ({e}) + a * 0")
    body.append(f"tl.store(Z + o, z.to({DTYPES[dtype]}), mask=m{r.choice(['', ' & (a != 1)'])})")
    low, high = span(dtype)
    t = (dtype, n, low, high)
    tol = {"f16": 2e-3, "bf16": 1.6e-2}.get(dtype, 1e-5)
    return Case(
        name,
        kernel(name, ["X", "Y", "Z", "N", "BLOCK: tl.constexpr"], body),
        [t, t, t, n],
        [2],
        (-(-n // block),),
        {"BLOCK": block},
        warps(r),
        tol,
    )


def shape2(r):
    return r.choice([1, 2, 8, 16, 32, 64, 128]), r.choice([1, 4, 16, 32, 64, 128])


def tile(p, dtype, strided=False):
    up = ".to(tl.float32)" if dtype in ("f16", "bf16") else ""
    at = "n[None, :] * M + m[:, None]" if strided else "m[:, None] * N + n[None, :]"
    return f"tl.load({p} + {at}){up}"


def reduction(r, name):
    m, n = shape2(r)
    dtype = r.choice(["i32", "f32", "f16", "bf16"])
    axis = r.randint(0, 1)
    op = r.choice(["sum", "max", "min", "argmax", "argmin", "xor_sum", "softmax", "var", "both"])
    if op == "xor_sum" and dtype != "i32":
        op = "sum"
    if op in ("softmax", "var") and dtype == "i32":
        op = "max"
    body = [
        "m = tl.arange(0, M)",
        "n = tl.arange(0, N)",
        f"x = {tile('X', dtype, r.random() < 0.4)}",
    ]
    if r.random() < 0.5:
        names = ["x", "m[:, None]", "n[None, :]"] if dtype == "i32" else ["x"]
        e = int_expr(r, 1, names) if dtype == "i32" else float_expr(r, 1, names)
        body.append(f"x = ({e}) + x * 0")
    keep, _index = ("n", "N") if axis == 0 else ("m", "M")
    size = n if axis == 0 else m
    out = "i32" if dtype == "i32" or op.startswith("arg") else "f32"
    if op == "softmax":
        grow = "[None, :]" if axis == 0 else "[:, None]"
        body += [
            f"e = tl.exp(x * 0.25 - tl.max(x * 0.25, {axis}){grow})",
            f"y = e / tl.sum(e, {axis}){grow}",
        ]
        body.append("tl.store(Y + m[:, None] * N + n[None, :], y)")
        size, out = m * n, "f32"
    elif op == "var":
        body += [
            f"s = tl.sum(x, {axis})",
            f"q = tl.sum(x * x, {axis})",
            f"tl.store(Y + {keep}, q * 64 - s * s)",
        ]
    elif op == "both":
        body.append(
            f"tl.store(Y + tl.arange(0, 1), tl.sum(tl.max(x, {axis}), 0) + tl.arange(0, 1))"
        )
        size = 1
    else:
        tie = ", tie_break_left=True" if op.startswith("arg") else ""
        body.append(f"tl.store(Y + {keep}, tl.{op}(x, {axis}{tie}))")
    low, high = span(dtype)
    return Case(
        name,
        kernel(name, ["X", "Y", "M: tl.constexpr", "N: tl.constexpr"], body),
        [(dtype, m * n, low, high), (out, size, 0, 1)],
        [1],
        (1,),
        {"M": m, "N": n},
        warps(r),
    )


def scan(r, name):
    m, n = shape2(r)
    dtype, axis = r.choice(["i32", "f32"]), r.randint(0, 1)
    op = r.choice(["cumsum", "cummax", "reverse", "loop"])
    helper = f"@triton.jit\ndef {name}_max(a, b):\n    return tl.maximum(a, b)\n\n\n"
    body = ["m = tl.arange(0, M)", "n = tl.arange(0, N)", f"x = {tile('X', dtype)}"]
    if op == "cumsum":
        body.append(f"y = tl.cumsum(x, {axis})")
    elif op == "reverse":
        body.append(f"y = tl.cumsum(x, {axis}, reverse=True)")
    elif op == "cummax":
        body.append(f"y = tl.associative_scan(x, {axis}, {name}_max)")
    else:
        body += ["y = x", "for i in range(3):", f"    y = tl.cumsum(y, {axis}) - x"]
    body.append("tl.store(Y + m[:, None] * N + n[None, :], y)")
    low, high = span(dtype)
    return Case(
        name,
        helper + kernel(name, ["X", "Y", "M: tl.constexpr", "N: tl.constexpr"], body),
        [(dtype, m * n, low, high), (dtype, m * n, 0, 1)],
        [1],
        (1,),
        {"M": m, "N": n},
        warps(r),
    )


def ordering(r, name):
    m, n = r.choice([1, 2, 4, 16]), r.choice([16, 32, 64, 128, 256])
    dtype = r.choice(["i32", "f32"])
    op = r.choice(["sort", "sort", "topk", "manual", "flip"])
    body = ["m = tl.arange(0, M)", "n = tl.arange(0, N)", f"x = {tile('X', dtype)}"]
    if op == "sort":
        body.append(f"y = tl.sort(x, 1, descending={r.random() < 0.5})")
    elif op == "topk":
        body += [
            "k = tl.arange(0, 8)",
            "y = tl.topk(x, 8)",
            "tl.store(Y + m[:, None] * 8 + k[None, :], y)",
        ]
    elif op == "flip":
        body.append("y = tl.flip(x, 1) - x")
    else:
        fill = -100000
        body += [
            "for i in range(4):",
            "    v = tl.max(x, 1)",
            "    j = tl.argmax(x, 1)",
            f"    x = tl.where(n[None, :] == j[:, None], {fill}, x)",
            "    tl.store(Y + m * 4 + i, v)",
        ]
    if op in ("sort", "flip"):
        body.append("tl.store(Y + m[:, None] * N + n[None, :], y)")
    low, high = span(dtype)
    return Case(
        name,
        kernel(name, ["X", "Y", "M: tl.constexpr", "N: tl.constexpr"], body),
        [(dtype, m * n, low, high), (dtype, m * n, 0, 1)],
        [1],
        (1,),
        {"M": m, "N": n},
        warps(r),
    )


def gather(r, name):
    n = r.choice([64, 128, 256, 512])
    kind = r.choice(["load", "load64", "gather", "join", "transpose", "reshape", "histogram"])
    dtype = r.choice(["i32", "f32", "f16"])
    args, size, consts = [(dtype, n, *span(dtype)), ("i32", n, 0, n)], n, {"N": n}
    body = ["n = tl.arange(0, N)", "i = tl.load(I + n)", "x = tl.load(X + n)"]
    if kind == "load":
        body.append(f"y = tl.load(X + i, mask=i % {r.randint(2, 5)} != 0, other=-1)")
    elif kind == "load64":
        body.append("y = tl.load(X + i.to(tl.int64)) + tl.load(X + (N - 1 - i).to(tl.int64))")
    elif kind == "gather":
        body.append("y = tl.gather(x, i, 0)")
    elif kind == "join":
        body += ["y = tl.interleave(x, x + 1)", "n = tl.arange(0, 2 * N)"]
        size = 2 * n
    elif kind == "transpose":
        body.append("y = tl.reshape(tl.trans(tl.reshape(x, (8, N // 8))), (N,)) + x")
    elif kind == "histogram":
        body += ["y = tl.histogram(i, N)"]
        dtype = "i32"
    else:
        body += [
            "z = tl.reshape(x, (N // 16, 4, 4))",
            "y = tl.reshape(tl.permute(z, (2, 0, 1)), (N,)) - x",
        ]
    body.append("tl.store(Y + n, y)")
    return Case(
        name,
        kernel(name, ["X", "I", "Y", "N: tl.constexpr"], body),
        [*args, (dtype, size, 0, 1)],
        [2],
        (1,),
        consts,
        warps(r),
    )


def atomic(r, name):
    block, programs, cells = r.choice([64, 128, 256]), r.randint(1, 4), r.choice([1, 7, 64])
    n = block * programs - r.randint(0, 40)
    dtype = r.choice(["i32", "f32"])
    op = r.choice(["add", "max", "min", "xchg"] + (["and", "or", "xor"] if dtype == "i32" else []))
    if dtype == "f32":  # the interpreter has no other float atomics
        op = "add"
    if op == "xchg":  # deterministic only without collisions
        cells = block * programs
    body = [
        "o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)",
        "m = o < N",
        "x = tl.load(X + o, mask=m, other=0)",
        f"tl.atomic_{op}(Y + o % {cells}, x, mask=m{r.choice(['', ' & (x > 0)'])})",
    ]
    # Triton 3.9.0 combines colliding signed max/min of a wave as unsigned: no negative inputs
    t = (dtype, n, 0, 1000) if op in ("max", "min") else (dtype, n, *span(dtype))
    return Case(
        name,
        kernel(name, ["X", "Y", "N", "BLOCK: tl.constexpr"], body),
        [t, (dtype, cells, 0, 5), n],
        [1],
        (programs,),
        {"BLOCK": block},
        warps(r),
    )


def dot(r, name):
    m, n, k = (r.choice([16, 32, 64, 128]) for _ in range(3))
    dtype = r.choice(["f32", "f16", "f16"])
    steps = r.choice([1, 1, 2, 3])
    ta, tb, tc = (r.random() < 0.4 for _ in range(3))
    total = k * steps
    a_at = "(kk + k)[None, :] * M + m[:, None]" if ta else "m[:, None] * KT + (kk + k)[None, :]"
    b_at = "n[None, :] * KT + (kk + k)[:, None]" if tb else "(kk + k)[:, None] * N + n[None, :]"
    ip = ', input_precision="ieee"' if dtype == "f32" else ""
    extra = r.choice(
        [
            "acc",
            "acc",
            "acc * 0.5 + m[:, None]",
            "tl.where(m[:, None] >= n[None, :], acc, -1e30)",
            "acc - tl.max(acc, 1)[:, None]",
            "acc + tl.sum(acc, 0)[None, :]",
        ]
    )
    chain = r.random() < 0.3
    body = [
        "m = tl.arange(0, M)",
        "n = tl.arange(0, N)",
        "k = tl.arange(0, K)",
        "acc = tl.zeros((M, N), tl.float32)",
        "for kk in range(0, KT, K):",
        f"    a = tl.load(A + {a_at})",
        f"    b = tl.load(B + {b_at})",
        f"    acc = tl.dot(a, b, acc{ip})",
    ]
    if chain:  # second product takes the first as operand
        up = ".to(tl.float16)" if dtype == "f16" else ""
        body += [
            "kk = 0",
            f"v = tl.load(B + {b_at})",
            f"acc = tl.dot(tl.trans(tl.clamp(acc, -4.0, 4.0)){up}, tl.load(A + {a_at}){ip})",
            "acc = tl.trans(acc)",
            "acc = tl.where(k[:, None] < 4, acc, acc * 2)",
        ]
        store = "tl.store(C + k[:, None] * N + n[None, :], acc)"
        size = k * n
    else:
        body.append(f"acc = {extra}")
        c_at = "n[None, :] * M + m[:, None]" if tc else "m[:, None] * N + n[None, :]"
        store = f"tl.store(C + {c_at}, acc)"
        size = m * n
    body.append(store)
    params = ["A", "B", "C", "KT", "M: tl.constexpr", "N: tl.constexpr", "K: tl.constexpr"]
    if chain:
        body = [line.replace("v = tl.load", "v_unused = tl.load") for line in body]
    options = warps(r) | {
        "matrix_instr_nonkdim": r.choice([0, 16, 32]),
        "num_stages": r.choice([1, 2]),
    }
    lo, hi = (-2, 2)
    return Case(
        name,
        kernel(name, params, body),
        [(dtype, m * total, lo, hi), (dtype, total * n, lo, hi), ("f32", size, 0, 1), total],
        [2],
        (1,),
        {"M": m, "N": n, "K": k},
        options,
    )


def loops(r, name):
    block = r.choice([32, 64, 128, 256])
    steps = r.randint(1, 5)
    n = block * steps + r.randint(0, block - 1)
    real = r.random() < 0.5
    t = ("f32" if real else "i32", n, *span("f32" if real else "i32"))
    expr = float_expr if real else int_expr
    body = ["o = tl.arange(0, BLOCK)", "s = tl.zeros((BLOCK,), X.dtype.element_ty)", "c = 0"]
    lo, hi = r.choice(["0", "P"]), r.choice(["N", "N - P"])
    kind = r.choice(["for", "while", "multi", "nested"])
    load = "x = tl.load(X + i + o, mask=i + o < N, other=0)"
    step = f"s = s + ({expr(r, 1, ['x'])})"
    if kind == "for":
        body += [f"for i in range({lo}, {hi}, BLOCK):", f"    {load}", f"    {step}", "    c += 1"]
    elif kind == "while":
        body += [
            f"i = {lo}",
            f"while i < {hi}:",
            f"    {load}",
            f"    {step}",
            "    i += BLOCK",
            "    c += 2",
        ]
    elif kind == "multi":
        w = r.choice([2, 30, 64, 100])
        body += [
            f"cut = tl.minimum(tl.maximum(N - {w}, 0) // BLOCK * BLOCK, N)",
            "for i in range(0, cut, BLOCK):",
            f"    {load}",
            f"    ok = (i + o - P >= 0) & (i + o - P < {w})",
            "    s = s + tl.where(ok, x, -3)",
            "    c += 1",
            "for i in range(cut, N, BLOCK):",
            f"    {load}",
            f"    {step}",
            "for i in range(0, P, 2):",
            "    s = s + i",
            "    c += i",
        ]
    else:
        body += [
            "for i in range(0, N, BLOCK):",
            f"    {load}",
            "    for j in range(0, P % 4):",
            "        if (i + j) % 3 == 0:",
            f"            {step}",
            "        else:",
            "            s = s - j",
            "        c += j",
            "    if tl.max(x, 0) > 0:",
            "        s = s + 1",
        ]
    body += ["tl.store(Y + o, s)", "tl.store(C + tl.arange(0, 1), tl.arange(0, 1) + c)"]
    return Case(
        name,
        kernel(name, ["X", "Y", "C", "N", "P", "BLOCK: tl.constexpr"], body),
        [t, (t[0], block, 0, 1), ("i32", 1, 0, 1), n, r.choice([2, 5, 8, 33])],
        [1, 2],
        (1,),
        {"BLOCK": block},
        warps(r),
    )


def attention(r, name):
    """Three consecutive loops over key tiles with window and causal masks."""
    bm, bn, d = r.choice([16, 32, 64]), r.choice([16, 32, 64]), r.choice([16, 32, 64])
    tiles = r.randint(1, 4)
    t = bm * tiles - r.choice([0, 0, 3])
    w = r.choice([8, 24, 32, 64, 65, 100, 1000])
    dtype = r.choice(["f32", "f16"])
    cast = ".to(tl.float16)" if dtype == "f16" else ""
    ip = ', input_precision="ieee"' if dtype == "f32" else ""

    def part(lo, hi, masked):
        lines = [
            f"for j in range({lo}, {hi}, BN):",
            "    jn = j + n",
            "    k = tl.load(K + jn[None, :] * D + d[:, None], mask=jn[None, :] < T, other=0.0)",
            f"    s = tl.dot(q, k{ip}) * 0.125",
        ]
        if masked:
            lines += [
                "    dist = qm[:, None] - jn[None, :]",
                "    s = tl.where((dist >= 0) & (dist < W), s, -1e30)",
            ]
        lines += [
            "    mn = tl.maximum(mx, tl.max(s, 1))",
            "    p = tl.exp2(s - mn[:, None])",
            "    a = tl.exp2(mx - mn)",
            "    l = l * a + tl.sum(p, 1)",
            "    v = tl.load(V + jn[:, None] * D + d[None, :], mask=jn[:, None] < T, other=0.0)",
            f"    acc = tl.dot(p{cast}, v, acc * a[:, None]{ip})",
            "    mx = mn",
        ]
        return lines

    body = [
        "pid = tl.program_id(0)",
        "m0 = pid * BM",
        "qm = m0 + tl.arange(0, BM)",
        "n = tl.arange(0, BN)",
        "d = tl.arange(0, D)",
        "q = tl.load(Q + qm[:, None] * D + d[None, :], mask=qm[:, None] < T, other=0.0)",
        "mx = tl.full((BM,), -1e30, tl.float32)",
        "l = tl.zeros((BM,), tl.float32)",
        "acc = tl.zeros((BM, D), tl.float32)",
        "diag = m0 // BN * BN",
        "lo = tl.maximum(m0 - (W - 1), 0) // BN * BN",
        "full = tl.minimum(tl.maximum(m0 + BM - W + BN - 1, 0) // BN * BN, diag)",
        "full = tl.maximum(full, lo)",
    ]
    body += (
        part("lo", "full", True)
        + part("full", "diag", False)
        + part("diag", "tl.minimum(m0 + BM, T)", True)
    )
    body.append(
        "tl.store(O + qm[:, None] * D + d[None, :], acc / l[:, None], mask=qm[:, None] < T)"
    )
    params = [
        "Q",
        "K",
        "V",
        "O",
        "T",
        "W: tl.constexpr",
        "BM: tl.constexpr",
        "BN: tl.constexpr",
        "D: tl.constexpr",
    ]
    x = (dtype, t * d, -2, 2)
    options = warps(r) | {
        "matrix_instr_nonkdim": r.choice([0, 16, 32]),
        "num_stages": r.choice([1, 2]),
    }
    return Case(
        name,
        kernel(name, params, body),
        [x, x, x, ("f32", t * d, 0, 1), t],
        [3],
        (-(-t // bm),),
        {"W": w, "BM": bm, "BN": bn, "D": d},
        options,
        2e-3 if dtype == "f16" else 1e-4,
    )


FAMILIES = {
    "elementwise": (elementwise, 30),
    "reduction": (reduction, 16),
    "scan": (scan, 8),
    "ordering": (ordering, 8),
    "gather": (gather, 8),
    "atomic": (atomic, 8),
    "dot": (dot, 14),
    "loops": (loops, 14),
    "attention": (attention, 8),
}


def generate(seed: int) -> Case:
    r = random.Random(seed)
    family = r.choices(list(FAMILIES), [w for _, w in FAMILIES.values()])[0]
    return FAMILIES[family][0](r, f"{family}_{seed}")
