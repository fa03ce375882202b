//! Where a container comes from: which engine made it and what it is called there, by what engines leave in its
//! annotations and by the place of its bundle.

use std::collections::HashMap;
use std::path::Path;

use serde::{Deserialize, Serialize};

/// As far as it is known.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Origin {
    /// `podman`, `nerdctl`, `docker`, `containerd`, `cri-o`, …
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub engine: Option<String>,
    /// The container's name; in a pod `namespace/pod/container`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// What it was made from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image: Option<String>,
}

impl Origin {
    /// What the annotations and the bundle's path say.
    pub fn of(annotations: &HashMap<String, String>, bundle: &Path) -> Self {
        let value = |key: &str| annotations.get(key).filter(|value| !value.is_empty()).cloned();
        let named = |engine: &str, name, image| Self { engine: Some(engine.to_owned()), name, image };
        // containerd `pkg/cri/annotations`
        if let Some(name) = value("io.kubernetes.cri.container-name") {
            let pod = [value("io.kubernetes.cri.sandbox-namespace"), value("io.kubernetes.cri.sandbox-name")];
            return named("containerd (CRI)", Some(path(pod, name)), value("io.kubernetes.cri.image-name"));
        }
        // CRI-O `pkg/annotations`, of which podman writes some too, but not these; ordinary containers it names by the
        // kubelet's own label, which it passes on
        let name = value("io.kubernetes.cri-o.ContainerName").or_else(|| {
            value("io.kubernetes.cri-o.ContainerType").and_then(|_| value("io.kubernetes.container.name"))
        });
        if let Some(name) = name {
            let pod = [value("io.kubernetes.pod.namespace"), value("io.kubernetes.pod.name")];
            return named("cri-o", Some(path(pod, name)), value("io.kubernetes.cri-o.ImageName"));
        }
        if value("io.container.manager").as_deref() == Some("libpod") {
            return named("podman", None, None);
        }
        if let Some(name) = value("nerdctl/name") {
            return named("nerdctl", Some(name), None);
        }
        if value("nerdctl/namespace").is_some() {
            return named("nerdctl", None, None);
        }
        // …/io.containerd.runtime.v2.task/<namespace>/<id>
        let mut above = bundle.ancestors().skip(1).filter_map(Path::file_name);
        match (above.next().and_then(|name| name.to_str()), above.next().and_then(|name| name.to_str())) {
            (Some("moby"), Some("io.containerd.runtime.v2.task")) => named("docker", None, None),
            (Some(_), Some("io.containerd.runtime.v2.task")) => named("containerd", None, None),
            _ => Self::default(),
        }
    }
}

fn path(pod: [Option<String>; 2], container: String) -> String {
    let parts: Vec<String> = pod.into_iter().flatten().chain([container]).collect();
    parts.join("/")
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    const TASK: &str = "/run/containerd/io.containerd.runtime.v2.task/default/c1";
    const MOBY: &str = "/run/docker/containerd/daemon/io.containerd.runtime.v2.task/moby/c1";

    /// As the engines write them.
    #[rstest]
    #[case(&[("io.container.manager", "libpod"), ("io.kubernetes.cri-o.TTY", "false"), ("org.opencontainers.image.stopSignal", "15")],
        "/x/overlay-containers/c1/userdata", Some("podman"), None, None)]
    #[case(&[("nerdctl/name", "train"), ("nerdctl/namespace", "default")], TASK, Some("nerdctl"), Some("train"), None)]
    #[case(&[("io.kubernetes.cri.container-type", "container"), ("io.kubernetes.cri.container-name", "train"),
             ("io.kubernetes.cri.image-name", "docker.io/library/t:1"), ("io.kubernetes.cri.sandbox-name", "pod"),
             ("io.kubernetes.cri.sandbox-namespace", "ml")],
        TASK, Some("containerd (CRI)"), Some("ml/pod/train"), Some("docker.io/library/t:1"))]
    #[case(&[("io.container.manager", "cri-o"), ("io.kubernetes.cri-o.ContainerType", "container"),
             ("io.kubernetes.cri-o.ContainerName", "train"), ("io.kubernetes.cri-o.ImageName", "quay.io/t:1"),
             ("io.kubernetes.pod.name", "pod"), ("io.kubernetes.pod.namespace", "ml")],
        "/run/containers/storage/overlay-containers/c1/userdata", Some("cri-o"), Some("ml/pod/train"), Some("quay.io/t:1"))]
    #[case(&[("io.kubernetes.cri-o.ContainerType", "container"), ("io.kubernetes.container.name", "train"),
             ("io.kubernetes.pod.name", "pod"), ("io.kubernetes.pod.namespace", "ml")],
        "/run/containers/storage/overlay-containers/c1/userdata", Some("cri-o"), Some("ml/pod/train"), None)]
    #[case(&[], MOBY, Some("docker"), None, None)]
    #[case(&[], TASK, Some("containerd"), None, None)]
    #[case(&[], "/bundles/c1", None, None, None)]
    fn engines_are_known_by_what_they_leave(
        #[case] annotations: &[(&str, &str)],
        #[case] bundle: &str,
        #[case] engine: Option<&str>,
        #[case] name: Option<&str>,
        #[case] image: Option<&str>,
    ) {
        let owned = |(key, value): &(&str, &str)| ((*key).to_owned(), (*value).to_owned());
        let origin = Origin::of(&annotations.iter().map(owned).collect(), Path::new(bundle));
        let text = |text: Option<&str>| text.map(ToOwned::to_owned);
        assert_eq!(origin, Origin { engine: text(engine), name: text(name), image: text(image) });
    }
}
