"""Published dimensions of real models."""

from planner.serving.dims import Dims, Experts, Latent, Recurrent

GEMMA = (1024,) * 5 + (0,)
MLA = Latent(1536, 512, 128, 64, 128)
DIMS = {
    d.name: d
    for d in (
        Dims("gpt2", 12, 768, 12, 12, 64, 3072, 50257, False, True, positions=1024,
             biased=True),
        Dims("gpt3-175b", 96, 12288, 96, 96, 128, 49152, 50257, False, True,
             positions=2048, biased=True),
        Dims("llama2-7b", 32, 4096, 32, 32, 128, 11008, 32000),
        Dims("llama2-13b", 40, 5120, 40, 40, 128, 13824, 32000),
        Dims("llama2-70b", 80, 8192, 64, 8, 128, 28672, 32000),
        Dims("llama3-8b", 32, 4096, 32, 8, 128, 14336, 128256),
        Dims("llama3-70b", 80, 8192, 64, 8, 128, 28672, 128256),
        Dims("llama3-405b", 126, 16384, 128, 8, 128, 53248, 128256),
        Dims("mistral-7b", 32, 4096, 32, 8, 128, 14336, 32000, windows=(4096,)),
        Dims("qwen3-32b", 64, 5120, 64, 8, 128, 25600, 151936, qk_norm=True),
        Dims("gemma3-27b", 62, 5376, 32, 16, 128, 21504, 262208, tied=True,
             windows=GEMMA),
        Dims("gpt-oss-120b", 36, 2880, 64, 8, 64, 2880, 201088, windows=(128, 0),
             experts=Experts(128, 4, 2880)),
        Dims("falcon-7b", 32, 4544, 71, 1, 64, 18176, 65024, False, True),
        Dims("falcon-180b", 80, 14848, 232, 8, 64, 59392, 65024, False, True),
        Dims("mixtral-8x7b", 32, 4096, 32, 8, 128, 14336, 32000,
             experts=Experts(8, 2, 14336)),
        Dims("qwen3-30b-a3b", 48, 2048, 32, 4, 128, 6144, 151936, qk_norm=True,
             experts=Experts(128, 8, 768)),
        Dims("qwen3-235b-a22b", 94, 4096, 64, 4, 128, 12288, 151936, qk_norm=True,
             experts=Experts(128, 8, 1536)),
        Dims("deepseek-v3", 61, 7168, 128, 128, 128, 18432, 129280,
             experts=Experts(256, 8, 2048, 2048, 3), latent=MLA),
        Dims("kimi-k2", 61, 7168, 64, 64, 128, 18432, 163840,
             experts=Experts(384, 8, 2048, 2048, 1), latent=MLA),
        Dims("qwen3-next-80b", 48, 2048, 16, 2, 256, 5120, 151936,
             experts=Experts(512, 10, 512, 512),
             recurrent=Recurrent(4, 16, 32, 128, 128)),
    )
}  # fmt: skip
