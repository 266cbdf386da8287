"""Amounts in words, with a unit."""


def human_bytes(n: float) -> str:
    return human(n, "B", 1024, ("", "Ki", "Mi", "Gi", "Ti", "Pi"))


def human_flops(n: float) -> str:
    return human(n, "FLOP", 1000, ("", "k", "M", "G", "T", "P"))


def human(n: float, unit: str, base: int, prefixes: tuple[str, ...]) -> str:
    for prefix in prefixes[:-1]:
        if abs(n) < base:
            return f"{n:.4g} {prefix}{unit}"
        n /= base
    return f"{n:.4g} {prefixes[-1]}{unit}"
