"""Call CUDA's libraries as training programs do: linear algebra, sparse matrices, transforms, randomness."""

import torch
from torch.nn.functional import dropout

torch.set_default_device("cuda")


def matrix(*sizes: int) -> torch.Tensor:
    return torch.randn(*sizes, requires_grad=True)


def backward(result: torch.Tensor) -> None:
    result.abs().sum().backward()


for sizes in ((96, 96), (8, 64, 64), (256, 4, 4)):
    for decompose in (
        *(
            torch.linalg.cholesky,
            torch.linalg.svdvals,
            torch.linalg.eigvalsh,
            torch.linalg.inv,
            torch.linalg.det,
        ),
        *(torch.linalg.pinv, torch.linalg.cond, torch.linalg.matrix_norm, torch.cholesky_inverse),
    ):
        backward(decompose(matrix(*sizes)))
    for decompose in (
        torch.linalg.qr,
        torch.linalg.svd,
        torch.linalg.eigh,
        torch.linalg.lu,
        torch.linalg.slogdet,
    ):
        backward(decompose(matrix(*sizes))[-1])
    for solve in (torch.linalg.solve, torch.cholesky_solve):
        backward(solve(matrix(*sizes), matrix(*sizes)))
    backward(torch.linalg.lstsq(matrix(*sizes), matrix(*sizes)).solution)
    backward(torch.linalg.householder_product(matrix(*sizes), matrix(*sizes[:-1])))
    torch.linalg.ldl_factor(torch.randn(*sizes))

rows = torch.arange(5000, device="cpu") % 1000
coo = torch.sparse_coo_tensor(
    torch.stack([rows, rows]), torch.ones(5000, device="cpu"), (1000, 1000), device="cpu"
)
coo = coo.coalesce()
for sparse in (coo.cuda(), coo.to_sparse_csr().cuda()):
    backward(torch.sparse.mm(sparse, matrix(1000, 64)))
    backward(torch.sparse.mm(sparse.detach().requires_grad_(), matrix(1000, 64)).sum(1))
    sparse @ torch.randn(1000)
    torch.sparse.mm(sparse, sparse)
torch.sparse.sampled_addmm(coo.to_sparse_csr().cuda(), torch.randn(1000, 8), torch.randn(8, 1000))
torch.triangular_solve(torch.randn(1000, 4), coo.to_sparse_csr().cuda())

backward(torch.fft.irfft(torch.fft.rfft(matrix(64, 1000))))
backward(torch.fft.fftn(matrix(4, 32, 32, 32)))
window = torch.hann_window(400)
torch.istft(torch.stft(torch.randn(2, 16000), 400, return_complex=True, window=window), 400, window=window)

backward(dropout(matrix(9, 9)))
torch.randperm(99_999)
torch.multinomial(torch.rand(9) + 1, 3)
torch.distributions.Dirichlet(torch.ones(4)).sample()
torch.rand(3, generator=torch.Generator("cuda").manual_seed(1))
(
    torch.normal(0.0, 1.0, (9,)),
    torch.randint(9, (9,)),
    torch.empty(9).exponential_(),
    torch.bernoulli(torch.rand(9)),
)
