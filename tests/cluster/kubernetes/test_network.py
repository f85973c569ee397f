"""Proves: each selector of the chart finds the pods that it means, as the operator labels them, and
the network policies let in those who must reach them."""

from __future__ import annotations

import re

import pytest

from tests.cluster.kubernetes.helm import DEPLOY, documents, overlaid, render
from tests.cluster.kubernetes.operator_rules import VERSIONS, groups, pod_labels, serve_service
from tests.cluster.kubernetes.rendered import (
    Rendered,
    config_of,
    of_kind,
    ray_service,
    redis,
    settings,
)


def selects(selector: dict[str, str], labels: dict[str, str]) -> bool:
    return selector.items() <= labels.items()


def test_each_selector_finds_the_pods_that_it_means(rendered: Rendered) -> None:
    service = ray_service(rendered)
    head, workers = (pod_labels(service, group) for group in groups(service))
    for budget in of_kind(rendered, "PodDisruptionBudget"):
        wanted = head if budget["metadata"]["name"].endswith("-head") else workers
        found = budget["spec"]["selector"]["matchLabels"]
        assert [labels for labels in (head, workers) if selects(found, labels)] == [wanted]
        # No scale stands behind these pods: only a number that must stay is understood.
        assert "maxUnavailable" not in budget["spec"]
        assert isinstance(budget["spec"]["minAvailable"], int)
    for policy in of_kind(rendered, "NetworkPolicy"):
        only_head = policy["metadata"]["name"].endswith("-head")
        found = policy["spec"]["podSelector"]["matchLabels"]
        assert selects(found, head)
        assert selects(found, workers) is not only_head
    for monitor in of_kind(rendered, "PodMonitor"):
        found = monitor["spec"]["selector"]["matchLabels"]
        assert selects(found, head)
        assert selects(found, workers)
        (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
        for group in groups(service):
            assert {"containerPort": 8080, "name": endpoint["port"]} in group.ray["ports"]
    for own in of_kind(rendered, "Service"):
        assert selects(own["spec"]["selector"], workers)
        assert not selects(own["spec"]["selector"], head)


def test_the_network_policy_lets_in_clients_operator_and_prometheus_and_nobody_else() -> None:
    rendered = documents(render(settings("operated")))
    whole, of_head = of_kind(rendered, "NetworkPolicy")
    assert whole["spec"]["policyTypes"] == ["Ingress", "Egress"]
    own, clients, operator, prometheus = whole["spec"]["ingress"]
    service = ray_service(rendered)
    (peer,) = own["from"]
    assert all(
        selects(peer["podSelector"]["matchLabels"], pod_labels(service, group))
        for group in groups(service)
    )
    assert [port["port"] for port in clients["ports"]] == [8000, 9000]
    # Both the operator's chart and its plain manifests label it so (helm-chart/kuberay-operator,
    # config/manager/manager.yaml). It asks the dashboard, and no proxy of a head that is excluded
    # from the Service (controllers/ray/rayservice_controller.go, updateHeadPodServeLabel).
    (peer,) = operator["from"]
    component = {"app.kubernetes.io/component": "kuberay-operator"}
    assert peer["podSelector"]["matchLabels"] == component
    assert [port["port"] for port in operator["ports"]] == [8265]
    assert service["spec"]["excludeHeadPodFromServeSvc"] is True
    assert [port["port"] for port in prometheus["ports"]] == [8080]
    assert of_head["spec"]["policyTypes"] == ["Egress"]


def test_what_else_pods_may_reach_is_a_value() -> None:
    collector = {"to": [{"ipBlock": {"cidr": "10.0.0.7/32"}}], "ports": [{"port": 4318}]}
    rendered = documents(
        render(overlaid(settings("operated"), {"networkPolicy": {"egress": [collector]}}))
    )
    whole, of_head = of_kind(rendered, "NetworkPolicy")
    assert collector in whole["spec"]["egress"]
    assert collector not in of_head["spec"]["egress"]


def test_the_world_reaches_the_api_and_the_health_checks_as_through_our_nginx() -> None:
    paths = {
        path["path"]: path["pathType"]
        for ingress in of_kind(documents(render(settings("operated"))), "Ingress")
        for path in ingress["spec"]["rules"][0]["http"]["paths"]
    }
    nginx = (DEPLOY / "tls" / "nginx.conf").read_text()
    exact = set(re.findall(r"location = (/\S+)", nginx))
    prefixes = {found.rstrip("/") for found in re.findall(r"location (/\S+)/ ", nginx)}
    assert {path for path, kind in paths.items() if kind == "Exact"} == exact
    assert {path for path, kind in paths.items() if kind == "Prefix"} == prefixes


def test_redis_is_reached_by_ray_and_by_nobody_else() -> None:
    rendered = documents(render(settings("operated")))
    cluster = ray_service(rendered)["spec"]["rayClusterConfig"]
    store, place, closed = redis()
    address = f"{store['metadata']['name']}:{store['spec']['ports'][0]['port']}"
    assert cluster["gcsFaultToleranceOptions"]["redisAddress"] == address
    # Workers wait so long for the new head (utils/constant.go,
    # DefaultWorkerRayGcsReconnectTimeoutS), and requests for the pool on it.
    assert config_of(ray_service(rendered)).pool.unreachable_s >= 600
    labels = place["spec"]["template"]["metadata"]["labels"]
    assert selects(store["spec"]["selector"], labels)
    assert selects(closed["spec"]["podSelector"]["matchLabels"], labels)
    (allowed,) = closed["spec"]["ingress"]
    (peer,) = allowed["from"]
    head, _ = groups(ray_service(rendered))
    assert selects(peer["podSelector"]["matchLabels"], pod_labels(ray_service(rendered), head))
    whole, _ = of_kind(rendered, "NetworkPolicy")
    out = whole["spec"]["egress"][-1]
    assert selects(out["to"][0]["podSelector"]["matchLabels"], labels)


@pytest.mark.parametrize("version", VERSIONS)
def test_every_ingress_leads_to_a_port_of_a_service(version: tuple[int, int]) -> None:
    operated = settings("operated")
    if version < (1, 6):
        operated = overlaid(operated, {"grpcService": {"enabled": True}})
    rendered = documents(render(operated))
    made = serve_service(ray_service(rendered), version)
    assert made is not None
    ports = {made["name"]: set(made["ports"].values())}
    for own in of_kind(rendered, "Service"):
        ports[own["metadata"]["name"]] = {port["port"] for port in own["spec"]["ports"]}
    for ingress in of_kind(rendered, "Ingress"):
        for path in ingress["spec"]["rules"][0]["http"]["paths"]:
            backend = path["backend"]["service"]
            assert backend["port"]["number"] in ports[backend["name"]]
