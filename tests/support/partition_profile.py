"""A profile of a device whose times follow TeraPipe's equation 9, for tests."""

from megatron.seq1f1b.planning.costs import Measurement, ModelShape, Profile, write_profile

MODEL = ModelShape(4, 256, 1024, 4, 64, 512)
LENGTHS = (512, 1024, 2048, 4096)
PREFIXES = (0, 1024, 4096, 12288)


def forward(length, prefix):
    return 1e-4 + 1e-6 * length + 1e-9 * length * (prefix + length / 2)


def weight(length):
    return 5e-7 * length


def profile(noise=lambda length, prefix: 1.0):
    layer = [
        Measurement(n, p, forward(n, p) * noise(n, p), 2.2 * forward(n, p) * noise(n, p), weight(n))
        for n in LENGTHS
        for p in PREFIXES
    ]
    embedding = [Measurement(n, 0, 1e-7 * n, 2e-7 * n, 0.0) for n in LENGTHS]
    head = [Measurement(n, 0, 3e-6 * n, 6e-6 * n, 3e-6 * n) for n in LENGTHS]
    return Profile("a device", MODEL, 1, 1, {"layer": layer, "embedding": embedding, "head": head})


def write_example(path):
    write_profile(profile(), path)
