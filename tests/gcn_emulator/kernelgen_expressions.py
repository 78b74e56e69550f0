"""Random integer and float expressions in Triton's language."""


def int_expr(r, depth, names):
    if depth == 0 or r.random() < 0.15:
        return r.choice([*names, str(r.randint(-40, 40))])
    a, b = (int_expr(r, depth - 1, names) for _ in range(2))
    c = r.choice(names)
    return r.choice(
        [
            f"({a} + {b})",
            f"({a} - {b})",
            f"({a} * {b})",
            f"({a} & {b})",
            f"({a} | {b})",
            f"({a} ^ {b})",
            f"({a} << {r.randint(0, 9)})",
            f"({a} >> {r.randint(0, 9)})",
            f"tl.minimum({a} + {c}, {b})",
            f"tl.maximum({a} + {c}, {b})",
            f"tl.where({cond(r, names)}, {a}, {b})",
            f"(-({a} + {c}))",
            f"(~({a} + {c}))",
            f"(({a} & 1023) // {r.choice([1, 3, 7, 16, 100])})",
            f"(({a} & 4095) % {r.choice([2, 3, 7, 16, 100])})",
            f"tl.abs({a} + {c})",
            f"({c} * {r.randint(-70000, 70000)} + {b})",
            f"tl.where({cond(r, names)}, 1, {b})",
            f"({cond(r, names)}).to(tl.int32)",
        ]
    )


def cond(r, names):
    a, b = r.choice(names), r.choice([*names, str(r.randint(-20, 20))])
    c = f"({a} {r.choice(['<', '<=', '>', '>=', '==', '!='])} {b})"
    if r.random() < 0.3:
        d = r.choice(names)
        c = f"({c} {r.choice(['&', '|', '^'])} ({d} {r.choice(['<', '>='])} {r.randint(-10, 10)}))"
    if r.random() < 0.25:  # a window, as in attention masks
        low, high = r.randint(-5, 5), r.randint(-5, 5)
        c = f"(({a} - {low} >= 0) & ({a} - {high} < {r.choice([2, 8, 64, 192])}))"
    return c


def float_expr(r, depth, names):
    if depth == 0 or r.random() < 0.15:
        return r.choice([*names, str(r.choice([0.5, 1.0, -2.0, 0.25, 3.0]))])
    a, b = (float_expr(r, depth - 1, names) for _ in range(2))
    c = r.choice(names)
    return r.choice(
        [
            f"({a} + {b})",
            f"({a} - {b})",
            f"({a} * {c})",
            f"tl.minimum({a} + {c}, {b})",
            f"tl.maximum({a} + {c}, {b})",
            f"tl.where({cond(r, names)}, {a}, {b})",
            f"tl.abs({a} + {c})",
            f"(-({a} + {c}))",
            f"({a} * {b} + {c})",
            f"tl.floor({a} + {c})",
            f"tl.ceil({a} + {c})",
            f"tl.where({c} > 0, {a}, -1e30)" if r.random() < 0.2 else f"({c} * 2)",
            f"tl.clamp({a} + {c}, -3.0, 5.0)",
        ]
    )


def final_float(r, e):
    return r.choice(
        [
            e,
            e,
            f"tl.exp(tl.minimum({e}, 4.0) * 0.25)",
            f"tl.exp2(tl.clamp({e}, -8.0, 8.0))",
            f"tl.log(tl.abs({e}) + 1.0)",
            f"tl.sqrt(tl.abs({e}))",
            f"tl.rsqrt(tl.abs({e}) + 1.0)",
            f"({e}) / 3.0",
            f"1.0 / (tl.abs({e}) + 0.5)",
            f"tl.sin(tl.clamp({e}, -30.0, 30.0))",
            f"tl.sigmoid(tl.clamp({e}, -8.0, 8.0))",
            f"tl.erf(tl.clamp({e}, -4.0, 4.0))",
            f"tl.div_rn(({e} + a * 0).to(tl.float32), 7.0)",
            f"tl.sqrt_rn(tl.abs({e} + a * 0).to(tl.float32))",
        ]
    )
