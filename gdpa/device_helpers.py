"""Helper functions of device code, as text: what operations are made of that are no single expression (gdpa/device_source.py)."""

from __future__ import annotations

from gdpa.lowering import Precision

# Helper functions, by the operation they implement. Coefficients without a source are Taylor's.
PORTABLE = {
    "exp": '''
@jit
def exp(x):
    """2^k * 2^(r / log 2) with x = k log 2 + r, |r| < 0.35: tl.exp rounds x / log 2 whole and errs |x| * 6e-8, 5e-6 at 80."""
    k = tl.floor(x * 1.4426950408889634 + 0.5)
    r = (x - k * 0.693359375) - k * -2.12194440e-4
    return tl.where(tl.abs(x) < 87.0, tl.exp2(k) * tl.exp2(r * 1.4426950408889634), tl.exp(x))
''',
    "tanh": '''
@jit
def tanh(x):
    """Near 0 a polynomial (Cephes tanhf), so that the relative error stays below 3e-7; no overflow for large |x|."""
    z = x * x
    p = (((-5.70498872745e-3 * z + 2.06390887954e-2) * z - 5.37397155531e-2) * z + 1.33314422036e-1) * z
    small = (p - 3.33332819422e-1) * z * x + x
    a = tl.abs(x)
    large = 1.0 - 2.0 / (exp(2.0 * a) + 1.0)
    return tl.where(a < 0.625, small, tl.where(x < 0.0, -large, large))
''',
    "sigmoid": '''
@jit
def sigmoid(x):
    """exp overflows to inf for x < -88, and 1 / inf = 0 is right there."""
    return 1.0 / (1.0 + exp(-x))
''',
    "expm1": '''
@jit
def expm1(x):
    """Near 0 the series, which exp(x) - 1 would lose to cancellation."""
    p = 1.0 + x * (1.0 / 7.0) * (1.0 + x * (1.0 / 8.0))
    p = 1.0 + x * (1.0 / 4.0) * (1.0 + x * (1.0 / 5.0) * (1.0 + x * (1.0 / 6.0) * p))
    small = x * (1.0 + x * 0.5 * (1.0 + x * (1.0 / 3.0) * p))
    return tl.where(tl.abs(x) < 0.5, small, exp(x) - 1.0)
''',
    "log1p": '''
@jit
def log1p(x):
    """Near 0 a polynomial (Cephes logf), which log(1 + x) would lose to the rounding of 1 + x."""
    p = ((7.0376836292e-2 * x - 1.1514610310e-1) * x + 1.1676998740e-1) * x - 1.2420140846e-1
    p = ((p * x + 1.4249322787e-1) * x - 1.6668057665e-1) * x + 2.0000714765e-1
    p = (p * x - 2.4999993993e-1) * x + 3.3333331174e-1
    z = x * x
    return tl.where(tl.abs(x) < 0.29, x + (x * z * p - 0.5 * z), tl.log(1.0 + x))
''',
    "sinh": '''
@jit
def sinh(x):
    """Near 0 the series; elsewhere from exp(|x| - log 2), which overflows only where sinh does."""
    z = x * x
    p = 1.0 + z * (1.0 / 42.0) * (1.0 + z * (1.0 / 72.0))
    small = x * (1.0 + z * (1.0 / 6.0) * (1.0 + z * (1.0 / 20.0) * p))
    half = exp(tl.abs(x) - 0.6931471805599453)
    large = half - 0.25 / half
    return tl.where(z < 1.0, small, tl.where(x < 0.0, -large, large))
''',
    "cosh": '''
@jit
def cosh(x):
    """From exp(|x| - log 2), which overflows only where cosh does."""
    half = exp(tl.abs(x) - 0.6931471805599453)
    return half + 0.25 / half
''',
    "erfc": '''
@jit
def erfc(x):
    """Numerical Recipes' Chebyshev fit: relative error below 1.2e-7 before rounding."""
    a = tl.abs(x)
    t = 1.0 / (1.0 + 0.5 * a)
    p = ((0.17087277 * t - 0.82215223) * t + 1.48851587) * t - 1.13520398
    p = ((p * t + 0.27886807) * t - 0.18628806) * t + 0.09678418
    p = (p * t + 0.37409196) * t + 1.00002368
    tail = t * exp(p * t - 1.26551223 - a * a)
    return tl.where(x < 0.0, 2.0 - tail, tail)
''',
    "normal_cdf": '''
@jit
def normal_cdf(x):
    """The standard normal distribution function."""
    return 0.5 * tl.erf(x * 0.7071067811865476) + 0.5
''',
    "round": '''
@jit
def round(x):
    """To the nearest integer, ties to even: adding 1.5 * 2^23 leaves no fraction bits."""
    return tl.where(tl.abs(x) < 4194304.0, (x + 12582912.0) - 12582912.0, x)
''',
    "trunc": '''
@jit
def trunc(x):
    """Towards zero."""
    return tl.where(x < 0.0, tl.ceil(x), tl.floor(x))
''',
    "sign": '''
@jit
def sign(x):
    """-1, 0 or 1; 0 for nan, as torch has it."""
    return tl.where(x > 0.0, 1.0, tl.where(x < 0.0, -1.0, 0.0))
''',
    "pow": '''
@jit
def pow(x, y):
    """x ** y for any sign of x: nan where x < 0 and y is no integer."""
    magnitude = tl.exp2(y * tl.log2(tl.abs(x)))
    integer = tl.floor(y) == y
    odd = tl.floor(y * 0.5) * 2.0 != y
    negative = tl.where(integer, tl.where(odd, -magnitude, magnitude), float("nan"))
    result = tl.where(x < 0.0, negative, magnitude)
    return tl.where((y == 0.0) | (x == 1.0), 1.0, result)
''',
}

FAST = {
    "tanh": '''
@jit
def tanh(x):
    """Relative error below 2^-11; on an H200 1e-5."""
    return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
''',
    "reciprocal": '''
@jit
def reciprocal(x):
    """One unit in the last place; 0 for |x| > 2^126."""
    return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
''',
    "exp2": '''
@jit
def exp2(x):
    """Two units in the last place; 0 below 2^-126."""
    return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
''',
    "log2": '''
@jit
def log2(x):
    """Absolute error below 2^-22."""
    return tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
''',
    "erf": '''
@jit
def erf(x):
    """1 - 2^p(|x|), p cubic: absolute error below 1.7e-4."""
    a = tl.abs(x)
    magnitude = 1.0 - exp2(a * (a * (a * -0.09103036 - 0.9536531) - 1.62219303))
    return tl.where(x < 0.0, -magnitude, magnitude)
''',
}

# What errs less than the rounding of results.
FAST_OF: dict[Precision, tuple[str, ...]] = {
    "float32": (),
    "float16": ("reciprocal", "exp2", "log2"),
    "float16_sm90": ("tanh", "reciprocal", "exp2", "log2"),
    "float16_sm90_many": ("tanh", "reciprocal", "exp2", "log2"),
    "bfloat16": tuple(FAST),
}
