"""gRPC over an asyncio channel."""

from collections.abc import AsyncGenerator

import grpc
import grpc.aio

from dragoman.client.address import Address
from dragoman.client.exchange import Deadline, GrpcQuestion
from dragoman.client.grpc_sync import OPTIONS, credentials, options, path, told


class GrpcTransport:
    """Sends questions to one server, from one event loop."""

    def __init__(self, address: Address) -> None:
        self._address = address
        if address.secure:
            self._channel = grpc.aio.secure_channel(address.authority, credentials(address), OPTIONS)
        else:
            self._channel = grpc.aio.insecure_channel(address.authority, OPTIONS)

    async def ask(self, question: GrpcQuestion, deadline: Deadline) -> bytes:
        """The answer's message. Raises what a status tells."""
        method = self._channel.unary_unary(path(question))
        try:
            return bytes(await method(question.message, **options(self._address, deadline)))
        except grpc.aio.AioRpcError as fault:
            raise told(fault, deadline, self._address) from fault

    async def stream(self, question: GrpcQuestion, deadline: Deadline) -> AsyncGenerator[bytes, None]:
        """The messages as they come. Raises what a status tells."""
        method = self._channel.stream_stream(path(question))
        call = method(iter([question.message]), **options(self._address, deadline, streams=True))
        try:
            async for message in call:
                yield message
        except grpc.aio.AioRpcError as fault:
            raise told(fault, deadline, self._address) from fault
        finally:
            call.cancel()

    async def close(self) -> None:
        await self._channel.close()
