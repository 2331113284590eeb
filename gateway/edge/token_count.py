"""`/v1/messages/count_tokens`: how many tokens the prompt of a request has."""

from dataclasses import dataclass
from functools import partial

from gateway.counters import CallFigures
from gateway.dialects.fields.unknown import Reading, ignored_header
from gateway.dialects.messages import Messages, request_of
from gateway.dialects.messages_wire import InputTokens
from gateway.dialects.wire import encode
from gateway.edge.images import with_images
from gateway.edge.reply import Reply
from gateway.edge.request import AgentRequest
from gateway.parts import GatewayParts
from rollout_queue.http.bodies.large_bodies import worked
from rollout_queue.http.errors import ApiError


@dataclass(frozen=True)
class TokenCount:
    """The endpoint that counts the tokens of a prompt. A request counts as a call, and samples nothing."""

    messages: Messages
    gateway: GatewayParts
    figures: CallFigures

    async def serve(self, request: AgentRequest, reply: Reply) -> None:
        gateway = self.gateway
        with Reading(report=gateway.settings.unknown_fields == "report") as ignored:
            payer, body, context_length = request.caller.payer, request.body, gateway.renderer.context_length
            asked = await worked(payer, body, request_of, body, context_length)
            prompt = await worked(payer, body, self.messages.prompt_of, asked)
        self.figures.ignoring += bool(ignored.paths)
        owner = await gateway.sessions.owner_of(request.caller)
        reply.more_headers = partial(gateway.admission.rate_headers, owner)
        gateway.admission.check_call(owner)
        call = await with_images(gateway.images, prompt, request.held)
        count = await gateway.generator.count(call, self.figures, owner)
        await reply.send_json(200, encode(InputTokens(count)), ignored_header(tuple(ignored.paths)))

    def error(self, error: ApiError) -> bytes:
        return self.messages.error(error)
