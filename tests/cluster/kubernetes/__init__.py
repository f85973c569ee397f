"""Our Helm chart, rendered here, and the rules of the KubeRay operator that it must keep."""
