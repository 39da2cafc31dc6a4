"""The shop: an order is a row and a message, both or neither."""

from django.db import IntegrityError
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.views.decorators.csrf import csrf_exempt

from halfmq.client import Message
from halfmq.integrations.django import transaction
from orders.models import Order


@csrf_exempt
def order(request: HttpRequest, number: str) -> HttpResponse:
    """Store an order, and publish it."""
    if request.method != "POST":
        return JsonResponse({"exists": Order.objects.filter(number=number).exists()})
    try:
        with transaction(Message("orders", number.encode(), keys=number)):
            Order.objects.create(number=number)
    except IntegrityError:  # nothing is stored or published
        return JsonResponse({"error": f"order {number} exists"}, status=409)
    return JsonResponse({"number": number}, status=201)
