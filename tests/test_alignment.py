import pytest

from tfamp.diagnostics import alignment


def product(*dimensions, layer="dense", m=64, n=64, k=64):
    named = tuple(alignment.Dimension(*pair) for pair in dimensions)
    return alignment.Product(layer, "MatMul", "float16", m, n, k, 1, named)


@pytest.mark.parametrize(
    ("name", "width", "elements"),
    [
        ("float16", 16, 8),
        ("bfloat16", 16, 8),
        ("tf32", 16, 4),
        ("float16", 128, 64),
        ("tf32", 128, 32),
    ],
)
def test_elements_of_the_guide(name, width, elements):
    assert alignment.elements(name, width) == elements


def test_elements_of_another_format_is_an_error():
    with pytest.raises(ValueError, match="Received: 'float32'"):
        alignment.elements("float32")


@pytest.mark.parametrize(
    ("size", "multiple", "padded"),
    [(1, 8, 8), (8, 8, 8), (9, 8, 16), (30522, 8, 30528), (50257, 64, 50304)],
)
def test_pad(size, multiple, padded):
    assert alignment.pad(size, multiple) == padded


CASES = {
    # role, size, format, bytes -> (padded, best) of a miss, None if there is none
    "vocabulary of BERT": ("vocabulary", 30522, "float16", 16, (30528, 30528)),
    "vocabulary of GPT-2": ("vocabulary", 50257, "bfloat16", 16, (50264, 50304)),
    "aligned": ("units", 1000, "float16", 16, None),
    "aligned, not to 128 bytes": ("units", 1000, "float16", 128, (1000, 1024)),
    "128 bytes would cost a third": ("units", 96, "float16", 128, None),
    "unaligned is not said twice": ("units", 1001, "float16", 128, None),
    "aligned for tf32": ("units", 12, "tf32", 16, None),
    "not aligned for tf32": ("units", 10, "tf32", 16, (12, 32)),
    "RGB": ("image channels", 3, "float16", 16, (4, 64)),
    "RGB, padded": ("image channels", 4, "float16", 16, None),
    "four channels inside": ("input channels", 4, "float16", 16, (8, 64)),
    "batch": ("batch size", 50, "float16", 16, (56, 64)),
}


@pytest.mark.parametrize(
    ("role", "size", "name", "width", "sizes"), CASES.values(), ids=CASES
)
def test_find_misses(role, size, name, width, sizes):
    found = alignment.find_misses([product((role, size))], name, width)
    assert [(miss.padded, miss.best) for miss in found] == ([sizes] if sizes else [])


def test_misses_are_joined_by_size_and_ordered_by_operations():
    small = product(("units", 10), layer="a", n=10)
    large = product(("vocabulary", 30522), ("input features", 64), n=30522, layer="b")
    again = product(("units", 10), ("units", 10), layer="c", n=10)
    misses = alignment.find_misses([small, large, again], "float16")
    assert [(miss.role, miss.layers) for miss in misses] == [
        ("vocabulary", ("b",)),
        ("units", ("a", "c")),
    ]
    assert misses[1].flops == small.flops + again.flops
    assert alignment.affected([small, large, again], "float16") == {small, large, again}
    assert alignment.affected([small, large._replace(dimensions=())], "float16") == {
        small
    }


def test_flops_count_multiplications_and_additions():
    assert product(m=2, n=3, k=5)._replace(repeats=7).flops == 2 * 2 * 3 * 5 * 7


TIMES = {
    # size, times, format -> (padded, best) of a miss, None if there is none
    "3 gates": (50, 3, "float16", (56, 64)),
    "4 gates": (31, 4, "float16", (32, 32)),
    "4 gates that fit": (30, 4, "float16", None),
    "8 heads": (15, 8, "float16", None),
    "4 heads in TF32": (15, 4, "tf32", None),
    "2 heads in TF32": (15, 2, "tf32", (16, 16)),
}


@pytest.mark.parametrize(("size", "times", "name", "sizes"), TIMES.values(), ids=TIMES)
def test_size_that_is_joined_several_times(size, times, name, sizes):
    found = alignment.find_misses([product(("units", size, times))], name)
    assert [(miss.padded, miss.best) for miss in found] == ([sizes] if sizes else [])


def test_one_padded_size_fits_all_that_a_layer_makes_of_it():
    gates, state = product(("units", 27, 4)), product(("units", 27))
    (miss,) = alignment.find_misses([gates, state], "float16")
    assert (miss.padded, miss.flops) == (32, gates.flops + state.flops)
    # Said once: 128 bytes are for what is aligned to 16.
    both = [product(("units", 30, 4)), product(("units", 30))]
    assert alignment.find_misses(both, "float16", 128) == []
    assert alignment.affected(both, "float16") == {both[1]}


def test_padded_size_fits_the_narrow_format_too():
    (miss,) = alignment.find_misses([product(("units", 9))], "tf32", narrow="float16")
    assert miss.padded == 16
    (miss,) = alignment.find_misses([product(("units", 9))], "tf32")
    assert miss.padded == 12
