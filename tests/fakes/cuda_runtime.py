"""A CUDA that only writes down which memory of the host is registered."""


class CudaRuntime:
    """`pinned` has the sizes of what is registered, by address; `code` is what registering answers."""

    def __init__(self) -> None:
        self.pinned, self.code = dict[int, int](), 0

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        if not self.code:
            self.pinned[address] = size
        return self.code

    def cudaHostUnregister(self, address: int) -> int:
        del self.pinned[address]
        return 0
