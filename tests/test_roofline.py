"""The roofline's own tests, on HLO as XLA writes it for a GPU; no plugin needed."""

import importlib.metadata
import json

import pytest

from benchmarks import roofline
from benchmarks.roofline import BANDWIDTH, PEAK_FLOPS, Figures
from jaxamp_like._hlo import text as hlo
from jaxamp_like._hlo.text import Shape

ADD = """
%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}
"""


def kernels(entry, *computations):
    """The kernels of a module with `entry` as the lines of its main computation."""
    header = "HloModule jit_step, is_scheduled=true, entry_computation_layout={()->()}"
    main = f"ENTRY %main (x: f32[8]) -> f32[8] {{\n  {entry.strip()}\n}}"
    text = "\n\n".join([header, *computations, main])
    return roofline.kernels(hlo.parse(text))


def fused(body, operands):
    """The kernel of one fusion, called with parameters of the given shapes."""
    lines = [
        f"  %x{i} = {shape} parameter({i})" for i, shape in enumerate(operands.split())
    ]
    names = ", ".join(f"%x{i}" for i in range(len(lines)))
    lines.append(
        f"  ROOT %fusion = f32[8]{{0}} fusion({names}), kind=kLoop, calls=%fused, "
        'metadata={op_name="jit(step)/while/body/add" scheduling_name="fusion"}'
    )
    computation = f"%fused (p: f32[8]) -> f32[8] {{\n  {body.strip()}\n}}"
    (kernel,) = kernels("\n".join(lines), ADD, computation)
    return kernel


# ---------------------------------------------------------------------------- parsing


def test_an_instruction_with_a_tuple_and_quoted_attributes():
    one = hlo.parse_instruction(
        "  ROOT %conv.1 = (bf16[2,4]{1,0}, /*index=1*/u8[0]{0}) "
        'custom-call(%x.2, /*index=1*/%w), custom_call_target="__cudnn$convForward", '
        'backend_config={"a":"(%no)"}'
    )
    assert one is not None and one.is_root
    assert (one.name, one.opcode) == ("conv.1", "custom-call")
    assert one.shapes == (Shape("bf16", (2, 4)), Shape("u8", (0,)))
    assert one.operands == ("x.2", "w")


@pytest.mark.parametrize(
    "line", ("", "}", '1 "/home/me/model.py"', "FileNames", "HloModule m, x={(f32[])}")
)
def test_other_lines_are_no_instructions(line):
    assert hlo.parse_instruction(line) is None


@pytest.mark.parametrize(
    ("dtype", "bits"),
    (
        ("pred", 8),
        ("bf16", 16),
        ("f32", 32),
        ("c64", 64),
        ("f8e4m3fn", 8),
        ("s4", 4),
        ("token", 0),
    ),
)
def test_bits_of_a_dtype(dtype, bits):
    assert Shape(dtype).bits == bits


def test_bytes_of_a_scalar():
    assert Shape("f32").size_in_bytes == 4


def test_a_module_without_an_entry_is_refused():
    with pytest.raises(ValueError, match="entry"):
        hlo.parse(ADD)


# ------------------------------------------------------------------------------ FLOPs

GEMM = """
  %x = {x}[128,512]{{1,0}} parameter(0)
  %w = {w}[512,256]{{1,0}} parameter(1)
  %gemm = ({x}[128,256]{{1,0}}, s8[4194304]{{0}}) custom-call(%x, %w), \
custom_call_target="__cublas$gemm", backend_config={{"gemm_backend_config":{{\
"dot_dimension_numbers":{{"lhs_contracting_dimensions":["1"],\
"rhs_contracting_dimensions":["0"],"lhs_batch_dimensions":[]}},\
"precision_config":{{"operand_precision":["DEFAULT"],"algorithm":"{algorithm}"}}}}}}
  ROOT %y = {x}[128,256]{{1,0}} get-tuple-element(%gemm), index=0
"""


def gemm(x="bf16", w="bf16", algorithm="ALG_UNSET"):
    (kernel,) = kernels(GEMM.format(x=x, w=w, algorithm=algorithm))
    return kernel


def test_a_gemm_of_the_library():
    kernel = gemm()
    assert kernel.flops == 2 * 128 * 512 * 256
    # Without the workspace.
    assert kernel.bytes == 2 * (128 * 512 + 512 * 256 + 128 * 256)


@pytest.mark.parametrize(
    ("dtypes", "peak"),
    (
        (("bf16", "bf16"), PEAK_FLOPS[16]),
        (("f16", "f16"), PEAK_FLOPS[16]),
        (("bf16", "f32"), PEAK_FLOPS[32]),
        (("f32", "f32"), PEAK_FLOPS[32]),
    ),
)
def test_peak_is_that_of_the_wider_operand(monkeypatch, dtypes, peak):
    monkeypatch.setattr(roofline, "BANDWIDTH", float("inf"))
    kernel = gemm(*dtypes)
    assert kernel.seconds == pytest.approx(kernel.flops / peak)


@pytest.mark.parametrize(
    ("algorithm", "peak"),
    (
        ("ALG_DOT_BF16_BF16_F32", PEAK_FLOPS[16]),
        ("ALG_DOT_F16_F16_F32", PEAK_FLOPS[16]),
        ("ALG_DOT_TF32_TF32_F32", PEAK_FLOPS[32]),
        ("ALG_DOT_BF16_BF16_F32_X3", PEAK_FLOPS[16] / 3),
    ),
)
def test_peak_is_that_of_a_chosen_algorithm(monkeypatch, algorithm, peak):
    monkeypatch.setattr(roofline, "BANDWIDTH", float("inf"))
    kernel = gemm("f32", "f32", algorithm)
    assert kernel.seconds == pytest.approx(kernel.flops / peak)


def test_a_small_contraction_is_bound_by_its_bytes():
    kernel = gemm()
    assert kernel.seconds == kernel.bytes / BANDWIDTH


def test_a_dot_in_a_fusion():
    body = """
  %p0 = bf16[4,256,128]{2,1,0} parameter(0)
  %p1 = bf16[4,128,512]{2,1,0} parameter(1)
  ROOT %dot = f32[4,256,512]{2,1,0} dot(%p0, %p1), lhs_batch_dims={0}, \
lhs_contracting_dims={2}, rhs_batch_dims={0}, rhs_contracting_dims={1}, \
algorithm=dot_bf16_bf16_f32
"""
    kernel = fused(body, "bf16[4,256,128] bf16[4,128,512]")
    assert kernel.flops == 2 * 4 * 256 * 128 * 512
    assert kernel.bytes == 2 * 4 * (256 + 512) * 128 + 4 * 4 * 256 * 512


# A stride-2 convolution with 3 input and 8 output features, and its two gradients.
SHAPES = {"x": "bf16[2,9,9,3]", "w": "bf16[8,3,3,3]", "y": "bf16[2,4,4,8]"}


@pytest.mark.parametrize(
    ("target", "operands", "result"),
    (
        ("convForward", "xw", "y"),
        ("convBiasActivationForward", "xw", "y"),
        ("convBackwardInput", "yw", "x"),
        ("convBackwardFilter", "xy", "w"),
    ),
)
def test_a_convolution_of_the_library(target, operands, result):
    first, second = (SHAPES[name] for name in operands)
    (kernel,) = kernels(
        f"  %a = {first} parameter(0)\n"
        f"  %b = {second} parameter(1)\n"
        f"  %conv = ({SHAPES[result]}, u8[64]) custom-call(%a, %b), "
        "window={size=3x3 stride=2x2}, dim_labels=b01f_o01i->b01f, "
        f'custom_call_target="__cudnn${target}"\n'
        f"  ROOT %y = {SHAPES[result]} get-tuple-element(%conv), index=0"
    )
    assert kernel.flops == 2 * (2 * 4 * 4 * 8) * (3 * 3 * 3)
    sizes = (2 * 9 * 9 * 3, 8 * 3 * 3 * 3, 2 * 4 * 4 * 8)
    assert kernel.bytes == 2 * sum(sizes)


# ------------------------------------------------------------------------------ bytes


def test_bytes_of_a_fusion():
    body = """
  %p0 = f32[64,32]{1,0} parameter(0)
  %p1 = bf16[32]{0} parameter(1)
  %wide = f32[32]{0} convert(%p1)
  %spread = f32[64,32]{1,0} broadcast(%wide), dimensions={1}
  %sum = f32[64,32]{1,0} add(%p0, %spread)
  %twice = f32[64,32]{1,0} multiply(%sum, %p0)
  ROOT %low = bf16[64,32]{1,0} convert(%twice)
"""
    kernel = fused(body, "f32[64,32] bf16[32]")
    assert kernel.bytes == 64 * 32 * 4 + 32 * 2 + 64 * 32 * 2
    assert kernel.seconds == kernel.bytes / BANDWIDTH
    assert not kernel.convert_only


def test_bytes_of_a_fusion_with_two_results():
    body = """
  %p0 = f32[64,32]{1,0} parameter(0)
  %zero = f32[] constant(0)
  %low = bf16[64,32]{1,0} convert(%p0)
  %sum = f32[64]{0} reduce(%p0, %zero), dimensions={1}, to_apply=%add
  ROOT %both = (f32[64]{0}, bf16[64,32]{1,0}) tuple(%sum, %low)
"""
    assert fused(body, "f32[64,32]").bytes == 64 * 32 * 4 + 64 * 4 + 64 * 32 * 2


def test_a_slice_reads_only_the_slice():
    body = """
  %p0 = f32[16,64,32]{2,1,0} parameter(0)
  %p1 = s32[] parameter(1)
  %zero = s32[] constant(0)
  %low = bf16[16,64,32]{2,1,0} convert(%p0)
  %one = bf16[1,64,32]{2,1,0} dynamic-slice(%low, %p1, %zero, %zero), \
dynamic_slice_sizes={1,64,32}
  ROOT %flat = bf16[64,32]{1,0} bitcast(%one)
"""
    assert fused(body, "f32[16,64,32] s32[]").bytes == 64 * 32 * (4 + 2) + 4


def test_slices_of_all_of_a_parameter_read_it_once():
    body = """
  %p0 = f32[2,64]{1,0} parameter(0)
  %a = f32[1,64]{1,0} slice(%p0), slice={[0:1], [0:64]}
  %b = f32[1,64]{1,0} slice(%p0), slice={[1:2], [0:64]}
  %c = f32[1,64]{1,0} multiply(%a, %b)
  ROOT %d = f32[1,64]{1,0} multiply(%c, %a)
"""
    assert fused(body, "f32[2,64]").bytes == 2 * 64 * 4 + 64 * 4


def test_an_update_in_place_writes_only_the_update():
    body = """
  %p0 = f32[16,64]{1,0} parameter(0)
  %p1 = bf16[64]{0} parameter(1)
  %p2 = s32[] parameter(2)
  %zero = s32[] constant(0)
  %wide = f32[64]{0} convert(%p1)
  %row = f32[1,64]{1,0} bitcast(%wide)
  ROOT %new = f32[16,64]{1,0} dynamic-update-slice(%p0, %row, %p2, %zero)
"""
    assert fused(body, "f32[16,64] bf16[64] s32[]").bytes == 64 * (2 + 4) + 4


def test_an_update_of_what_the_kernel_makes_is_not_in_place():
    body = """
  %p0 = bf16[16,64]{1,0} parameter(0)
  %p1 = f32[1,64]{1,0} parameter(1)
  %zero = s32[] constant(0)
  %wide = f32[16,64]{1,0} convert(%p0)
  ROOT %new = f32[16,64]{1,0} dynamic-update-slice(%wide, %p1, %zero, %zero)
"""
    assert fused(body, "bf16[16,64] f32[1,64]").bytes == 64 * (16 * 2 + 4 + 16 * 4)


def test_a_lookup_reads_only_the_rows():
    body = """
  %p0 = f32[1000,64]{1,0} parameter(0)
  %p1 = s32[8,1]{1,0} parameter(1)
  ROOT %rows = f32[8,1,64]{2,1,0} gather(%p0, %p1), offset_dims={1,2}
"""
    assert fused(body, "f32[1000,64] s32[8,1]").bytes == 2 * 8 * 64 * 4 + 8 * 4


def test_an_operation_outside_of_fusions():
    (kernel,) = kernels(
        "  %x = f32[16,64]{1,0} parameter(0)\n"
        "  %flat = f32[1024]{0} bitcast(%x)\n"
        "  ROOT %copy.1 = f32[1024]{0} copy(%flat)"
    )
    assert kernel.bytes == 2 * 1024 * 4


# ------------------------------------------------------------------------ convert-only


@pytest.mark.parametrize(
    ("lines", "expected"),
    (
        ("ROOT %y = bf16[8,4]{1,0} convert(%p0)", True),
        (
            "%c = bf16[8,4]{1,0} convert(%p0)\n"
            "%t = bf16[4,8]{1,0} transpose(%c), dimensions={1,0}\n"
            "ROOT %y = bf16[32]{0} bitcast(%t)",
            True,
        ),
        (
            "%c = bf16[8,4]{1,0} convert(%p0)\n"
            "%f = f16[8,4]{1,0} convert(%p0)\n"
            "ROOT %y = (bf16[8,4]{1,0}, f16[8,4]{1,0}) tuple(%c, %f)",
            True,
        ),
        ("ROOT %y = s32[8,4]{1,0} convert(%p0)", False),
        ("ROOT %y = f32[4,8]{1,0} transpose(%p0), dimensions={1,0}", False),
        (
            "%c = bf16[8,4]{1,0} convert(%p0)\nROOT %y = bf16[8,4]{1,0} negate(%c)",
            False,
        ),
    ),
)
def test_what_counts_as_convert_only(lines, expected):
    body = ["%p0 = f32[8,4]{1,0} parameter(0)", *lines.splitlines()]
    kernel = fused("\n".join(f"  {line}" for line in body), "f32[8,4]")
    assert kernel.convert_only is expected


def test_a_bare_convert_counts():
    (kernel,) = kernels(
        "  %x = f32[16]{0} parameter(0)\n  ROOT %y = bf16[16]{0} convert(%x)"
    )
    assert kernel.convert_only


# ------------------------------------------------------------------------ control flow

BODY = """
%body (state: (s32[], f32[64])) -> (s32[], f32[64]) {
  %state = (s32[], f32[64]{0}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %x = f32[64]{0} get-tuple-element(%state), index=1
  %y = f32[64]{0} negate(%x)
  ROOT %next = (s32[], f32[64]{0}) tuple(%i, %y)
}
"""
OUTER = """
%outer (state: (s32[], f32[64])) -> (s32[], f32[64]) {
  %state.1 = (s32[], f32[64]{0}) parameter(0)
  ROOT %inner = (s32[], f32[64]{0}) while(%state.1), condition=%c, body=%body, \
backend_config={"known_trip_count":{"n":"3"},"known_init_step":{"init":"0"}}
}
"""
WHILE = """
  %state.2 = (s32[], f32[64]{{0}}) parameter(0)
  ROOT %loop = (s32[], f32[64]{{0}}) while(%state.2), condition=%c, body=%{body}{config}
"""
TRIPS = ', backend_config={"known_trip_count":{"n":"5"}}'


def test_a_loop_counts_as_often_as_it_runs():
    (kernel,) = kernels(WHILE.format(body="body", config=TRIPS), BODY)
    assert kernel.times == 5


def test_loops_multiply():
    (kernel,) = kernels(WHILE.format(body="outer", config=TRIPS), BODY, OUTER)
    assert kernel.times == 15


def test_a_loop_of_unknown_length_is_refused():
    with pytest.raises(ValueError, match=r"how often loop runs"):
        kernels(WHILE.format(body="body", config=""), BODY)


def test_a_call_is_entered():
    entry = "ROOT %y = (s32[], f32[64]) call(%s), to_apply=%body"
    (kernel,) = kernels(f"  %s = (s32[], f32[64]) parameter(0)\n  {entry}", BODY)
    assert kernel.bytes == 2 * 64 * 4


def test_a_conditional_takes_its_slowest_branch():
    idle = "%idle (s: f32[64]) -> f32[64] {\n  ROOT %s = f32[64] parameter(0)\n}"
    entry = (
        "  %i = s32[] parameter(0)\n  %s = (s32[], f32[64]) parameter(1)\n"
        "  ROOT %y = (s32[], f32[64]) conditional(%i, %s, %s), "
        "branch_computations={%idle, %body}"
    )
    assert [kernel.name for kernel in kernels(entry, idle, BODY)] == ["y"]


def test_an_asynchronous_fusion_counts_once():
    body = (
        "%fused (p: f32[64]) -> bf16[64] {\n  %p = f32[64]{0} parameter(0)\n"
        "  ROOT %low = bf16[64]{0} convert(%p)\n}"
    )
    (kernel,) = kernels(
        "  %x = f32[64]{0} parameter(0)\n"
        "  %start = ((f32[64]{0}), bf16[64]{0}, u32[]) fusion-start(%x), kind=kLoop, "
        "calls=%fused\n"
        "  ROOT %done = bf16[64]{0} fusion-done(%start)",
        body,
    )
    assert kernel.bytes == 64 * (4 + 2)


# ---------------------------------------------------------------------------- the rest


def test_figures_of_a_module():
    text = BODY + (
        "ENTRY %main (x: f32[64]) -> bf16[64] {\n"
        "  %x = f32[64]{0} parameter(0)\n"
        "  %zero = s32[] constant(0)\n"
        "  %init = (s32[], f32[64]{0}) tuple(%zero, %x)\n"
        "  %loop = (s32[], f32[64]{0}) while(%init), condition=%c, "
        f"body=%body{TRIPS}\n"
        "  %y = f32[64]{0} get-tuple-element(%loop), index=1\n"
        "  ROOT %low = bf16[64]{0} convert(%y)\n}"
    )
    convert = 64 * (4 + 2) / BANDWIDTH
    assert roofline.figures(text, temp_bytes=256) == Figures(
        step_seconds=pytest.approx(5 * 2 * 64 * 4 / BANDWIDTH + convert),
        contraction_seconds=0,
        convert_seconds=pytest.approx(convert),
        temp_bytes=256,
        moved_bytes=5 * 2 * 64 * 4 + 64 * (4 + 2),
        flops=0,
        kernels=2,
        convert_kernels=1,
    )


def test_ratios():
    def row(seconds, temp, converts, compiling):
        return Figures(seconds, 0, 0, temp, 0, 0, 9, converts, compiling)

    plain, hand = row(2.0, 100, 0, None), row(1.0, 50, 4, 2.0)
    assert roofline.ratio_row(hand, plain, hand, None) == [
        *("2.00", "0.50"),
        *("1.00", "1.00", "+0"),
        *("-", "-", "-"),
        "1.00",
    ]
    assert roofline.ratio_row(plain, plain, hand, None)[-1] == "-"
    assert len(roofline.ratio_row(hand, plain, hand, None)) == len(roofline.RATIOS)
    assert len(roofline.figure_row(hand)) == len(roofline.FIGURES)


@pytest.mark.parametrize("installed", (None, "0.0.1"))
def test_without_the_plugin_it_says_what_to_install(monkeypatch, capsys, installed):
    version = importlib.metadata.version

    def lookup(package):
        if package not in roofline.PLUGINS:
            return version(package)
        if installed is None:
            raise importlib.metadata.PackageNotFoundError(package)
        return installed

    monkeypatch.setattr(importlib.metadata, "version", lookup)
    assert roofline.main([]) == 2
    message = capsys.readouterr().err
    for package in roofline.PLUGINS:
        assert f"{package}=={version('jaxlib')}" in message


@pytest.mark.skipif(
    not roofline.has_plugin(), reason="XLA's compiler for NVIDIA GPUs is not installed"
)
def test_a_workload_compiled_for_the_described_device(tmp_path):
    record = tmp_path / "record.json"
    argv = f"--workloads LSTM --contenders float32 hand --size toy --json {record}"
    assert roofline.main(argv.split()) == 0
    rows = json.loads(record.read_text())["workloads"]["LSTM"]
    # Whatever the precision, the same contractions.
    assert rows["float32"]["flops"] == rows["hand"]["flops"] > 0
    assert rows["float32"]["convert_kernels"] == 0
