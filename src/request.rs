//! A container's annotations to what it asks for.
//!
//! Keys are `oci-mps/<field>`, in a pod also `oci-mps/<field>.<container>`, and the words of `HAMi` and ACK. A key that
//! nearly says something is refused, never ignored: a container that meant to ask and is not heard has the whole GPU.

use std::collections::BTreeMap;

use crate::config::Aliases;
use crate::layout::{ANNOTATION_PREFIX, TOKEN_ANNOTATION};
use crate::size::{Field, Size, ValueError};

/// What a container asks for, and with which keys.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Request {
    /// The fields that it mentions.
    pub size: Size,
    /// The profile that it names.
    pub profile: Option<String>,
    /// Whether it is one of a pod's containers.
    pub in_pod: bool,
    keys: BTreeMap<Field, String>,
}

/// Annotations that do not say what is wanted.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RequestError {
    /// A key of ours that does not exist.
    #[error("unknown annotation {key}; the nearest one is {nearest}")]
    UnknownKey {
        /// As it was given.
        key: String,
        /// The known key that looks most like it.
        nearest: String,
    },
    /// A value outside its grammar.
    #[error("{key}: {error}")]
    Value {
        /// The annotation.
        key: String,
        /// What is wrong, and what would be right.
        error: ValueError,
    },
    /// Two keys for one thing.
    #[error("{one} and {other} both say the {field}; keep one of them")]
    Ambiguous {
        /// The first key.
        one: String,
        /// The second.
        other: String,
        /// What both of them say.
        field: String,
    },
    /// A key for one container of a pod, outside of any pod.
    #[error(
        "{key} is for the container {container:?} of a pod, but this container is in none; write {plain}"
    )]
    OutsidePod {
        /// The annotation.
        key: String,
        /// Whom it names.
        container: String,
        /// The same without the name.
        plain: String,
    },
    /// The mark of an edited spec, and nothing that it could have been edited for.
    #[error(
        "{TOKEN_ANNOTATION} is written by oci-mps and asks for nothing; ask with oci-mps/memory=…, or leave it out"
    )]
    TokenAlone,
    /// A share of the slices and, beside it, what the slices would say.
    #[error("{slices} already says memory and threads; leave out {other}")]
    SlicesAndMore {
        /// The key that gives the slices.
        slices: String,
        /// The key that contradicts it.
        other: String,
    },
}

/// What a container is to its pod, by what the engines' CRI plugins write (containerd `pkg/cri/annotations`, CRI-O
/// `pkg/annotations`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Role<'a> {
    /// Not in a pod.
    Alone,
    /// The pause container, which belongs to the pod and runs nothing.
    Sandbox,
    /// One of its containers; its name, where the engine says it.
    Member(Option<&'a str>),
}

/// What a key asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Target {
    Field(Field),
    Profile,
}

/// One annotation that is meant for this container.
struct Asked<'a> {
    key: &'a str,
    target: Target,
    value: String,
    qualified: bool,
}

impl Request {
    /// Reads the annotations of one container. `None`: it does not ask, or is not meant.
    ///
    /// # Errors
    /// Where it asks and what it asks for is not clear.
    pub fn read(annotations: &[(&str, &str)], aliases: Aliases) -> Result<Option<Self>, RequestError> {
        let role = Role::of(annotations);
        if role == Role::Sandbox {
            return Ok(None);
        }
        let mut asked = Vec::new();
        let (mut names_somebody, mut has_token) = (false, false);
        for &(key, value) in annotations {
            if let Some(alias) = alias(key, value, aliases)? {
                asked.push(alias);
            } else if key == TOKEN_ANNOTATION {
                has_token = true;
            } else if let Some(name) = key.strip_prefix(ANNOTATION_PREFIX) {
                let (field, container) = name.split_once('.').map_or((name, None), |(f, c)| (f, Some(c)));
                let target = Target::named(field).ok_or_else(|| unknown_key(key, field, container))?;
                names_somebody |= container.is_some();
                if role.is_meant_by(key, field, container)? {
                    asked.push(Asked {
                        key,
                        target,
                        value: value.to_owned(),
                        qualified: container.is_some(),
                    });
                }
            } else if is_nearly_ours(key) {
                return Err(unknown_key(key, last_word(key), None));
            }
        }
        let is_named = asked.iter().any(|asked| asked.qualified);
        if has_token && asked.is_empty() {
            return Err(RequestError::TokenAlone);
        }
        if asked.is_empty() || (names_somebody && !is_named) {
            return Ok(None);
        }
        Self::collect(role, asked).map(Some)
    }

    /// The annotation that a field came from.
    pub fn key_of(&self, field: Field) -> Option<&str> {
        self.keys.get(&field).map(String::as_str)
    }

    fn collect(role: Role<'_>, asked: Vec<Asked<'_>>) -> Result<Self, RequestError> {
        let mut request = Self { in_pod: matches!(role, Role::Member(_)), ..Self::default() };
        let (own, for_all): (Vec<_>, Vec<_>) = asked.into_iter().partition(|asked| asked.qualified);
        let mut profile_key: Option<&str> = None;
        // what names this container comes first, and then stands against what is said to all of the pod
        for asked in own.into_iter().chain(for_all) {
            let earlier = match asked.target {
                Target::Profile => profile_key,
                Target::Field(field) => request.key_of(field),
            };
            match earlier {
                Some(earlier) if !asked.qualified && is_qualified(earlier) => continue,
                Some(earlier) => return Err(ambiguous(earlier, &asked)),
                None => {}
            }
            match asked.target {
                Target::Profile => {
                    profile_key = Some(asked.key);
                    request.profile = Some(asked.value);
                }
                Target::Field(field) => {
                    let set = request.size.set(field, &asked.value);
                    set.map_err(|error| RequestError::Value { key: asked.key.to_owned(), error })?;
                    request.keys.insert(field, asked.key.to_owned());
                }
            }
        }
        request.refuse_slices_and_more()?;
        Ok(request)
    }

    fn refuse_slices_and_more(&self) -> Result<(), RequestError> {
        let Some(slices) = self.key_of(Field::Slices) else { return Ok(()) };
        match self.key_of(Field::Memory).or_else(|| self.key_of(Field::Threads)) {
            Some(other) => {
                Err(RequestError::SlicesAndMore { slices: slices.to_owned(), other: other.to_owned() })
            }
            None => Ok(()),
        }
    }
}

impl<'a> Role<'a> {
    fn of(annotations: &[(&str, &'a str)]) -> Self {
        let value =
            |keys: &[&str]| annotations.iter().find(|(key, _)| keys.contains(key)).map(|(_, value)| *value);
        let kind = value(&["io.kubernetes.cri.container-type", "io.kubernetes.cri-o.ContainerType"]);
        // CRI-O names ordinary containers by the kubelet's own label, which it passes on
        let name = value(&[
            "io.kubernetes.cri.container-name",
            "io.kubernetes.cri-o.ContainerName",
            "io.kubernetes.container.name",
        ]);
        match (kind, name) {
            (Some("sandbox"), _) => Self::Sandbox,
            (None, None) => Self::Alone,
            (_, name) => Self::Member(name),
        }
    }

    /// Whether a key with (or without) a container's name is said to this one.
    fn is_meant_by(self, key: &str, field: &str, container: Option<&str>) -> Result<bool, RequestError> {
        match (self, container) {
            (_, None) => Ok(true),
            (Self::Member(Some(name)), Some(container)) => Ok(name == container),
            (_, Some(container)) => Err(RequestError::OutsidePod {
                key: key.to_owned(),
                container: container.to_owned(),
                plain: format!("{ANNOTATION_PREFIX}{field}"),
            }),
        }
    }
}

impl Target {
    fn named(name: &str) -> Option<Self> {
        if name == "profile" { Some(Self::Profile) } else { Field::named(name).map(Self::Field) }
    }

    const fn name(self) -> &'static str {
        match self {
            Self::Profile => "profile",
            Self::Field(field) => field.name(),
        }
    }
}

/// The words of other systems, said in ours.
fn alias<'a>(key: &'a str, value: &str, aliases: Aliases) -> Result<Option<Asked<'a>>, RequestError> {
    let (field, before, after, what) = match key {
        "nvidia.com/gpu" if aliases.hami => (Field::Gpu, "auto:", "", "GPUs"),
        "nvidia.com/gpumem" if aliases.hami => (Field::Memory, "", "MiB", "MiB"),
        "nvidia.com/gpumem-percentage" if aliases.hami => (Field::Memory, "", "%", "percent"),
        "nvidia.com/gpucores" if aliases.hami => (Field::Threads, "", "%", "percent"),
        "aliyun.com/gpu-mem" if aliases.ack => (Field::Memory, "", "GiB", "GiB"),
        _ => return Ok(None),
    };
    if value.is_empty() || !value.bytes().all(|b| b.is_ascii_digit()) {
        let error = ValueError::Count { given: value.to_owned(), what };
        return Err(RequestError::Value { key: key.to_owned(), error });
    }
    let value = format!("{before}{value}{after}");
    Ok(Some(Asked { key, target: Target::Field(field), value, qualified: false }))
}

/// Whether a key begins like ours and is not: `oci-mps.memory`, `OCI-MPS/memory`. Who wrote it meant to ask.
fn is_nearly_ours(key: &str) -> bool {
    let own = ANNOTATION_PREFIX.trim_end_matches('/');
    let (start, rest) = key.split_at_checked(own.len()).unwrap_or((key, ""));
    start.eq_ignore_ascii_case(own) && !rest.starts_with(|c: char| c.is_ascii_alphanumeric())
}

fn last_word(key: &str) -> &str {
    key.rsplit(['/', '.', '_', ':']).next().unwrap_or(key)
}

/// Whether a key that was taken names a container.
fn is_qualified(key: &str) -> bool {
    key.strip_prefix(ANNOTATION_PREFIX).is_some_and(|name| name.contains('.'))
}

fn ambiguous(earlier: &str, asked: &Asked<'_>) -> RequestError {
    RequestError::Ambiguous {
        one: earlier.to_owned(),
        other: asked.key.to_owned(),
        field: asked.target.name().to_owned(),
    }
}

fn unknown_key(key: &str, field: &str, container: Option<&str>) -> RequestError {
    let known = Field::ALL.into_iter().map(Field::name).chain(["profile"]);
    let nearest = known.min_by_key(|name| strsim::damerau_levenshtein(name, field)).unwrap_or("memory");
    let container = container.map(|container| format!(".{container}")).unwrap_or_default();
    RequestError::UnknownKey {
        key: key.to_owned(),
        nearest: format!("{ANNOTATION_PREFIX}{nearest}{container}"),
    }
}

#[cfg(test)]
mod tests;
