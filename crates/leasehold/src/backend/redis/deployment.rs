//! The kinds of Redis deployments: one server, a primary behind sentinels, or the nodes of a cluster.

use redis::{ConnectionAddr, ConnectionInfo};

use super::url::{cluster, sentinel, server};
use crate::Error;

/// The deployment that a URL names.
///
/// It is public only for the command, whose `doctor` queries servers itself. It is not part of the API.
#[derive(Clone, Debug)]
pub enum Deployment {
    /// One server.
    Server(ConnectionInfo),
    /// A primary that sentinels name.
    Sentinel(SentinelSettings),
    /// Some nodes of a cluster. The client gets the others from them.
    Cluster(Vec<ConnectionInfo>),
}

/// The sentinels that monitor a primary.
#[derive(Clone, Debug)]
pub struct SentinelSettings {
    /// The sentinels in the URL.
    pub sentinels: Vec<ConnectionInfo>,
    /// The name of the primary in the sentinels' configuration.
    pub service: String,
    /// How to connect to the primary. Its address is replaced by the one that the sentinels name.
    pub server: ConnectionInfo,
}

/// How to connect to the sentinels, where that differs from the server.
#[derive(Clone, Default)]
pub(crate) struct SentinelAccess {
    pub(crate) user: Option<String>,
    pub(crate) password: Option<String>,
    pub(crate) tls: Option<bool>,
}

impl SentinelAccess {
    pub(crate) fn is_default(&self) -> bool {
        self.user.is_none() && self.password.is_none() && self.tls.is_none()
    }
}

impl Deployment {
    /// Parses a URL. No error repeats the URL, because it may contain a password.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if it is not a valid Redis URL.
    pub fn parse(url: &str) -> Result<Self, Error> {
        let (scheme, rest) = url.split_once("://").unwrap_or_default();
        match scheme {
            "redis-sentinel" => Ok(Self::Sentinel(sentinel("redis", rest)?)),
            "rediss-sentinel" => Ok(Self::Sentinel(sentinel("rediss", rest)?)),
            "redis-cluster" => Ok(Self::Cluster(cluster("redis", rest)?)),
            "rediss-cluster" => Ok(Self::Cluster(cluster("rediss", rest)?)),
            _ => Ok(Self::Server(server(url)?)),
        }
    }

    /// Returns the URL without secrets, for messages.
    #[must_use]
    pub fn address(&self) -> String {
        match self {
            Self::Server(info) => address(info),
            Self::Sentinel(own) => {
                let (scheme, hosts) = (scheme(&own.server), hosts(&own.sentinels));
                format!("{scheme}-sentinel://{hosts}/{}{}", own.service, database(&own.server))
            }
            Self::Cluster(seeds) => {
                let scheme = seeds.first().map_or("redis", scheme);
                format!("{scheme}-cluster://{}", hosts(seeds))
            }
        }
    }

    /// Applies `change` to the connection settings of every server and every sentinel.
    pub(super) fn change(
        &mut self,
        change: impl Fn(ConnectionInfo) -> Result<ConnectionInfo, Error>,
    ) -> Result<(), Error> {
        let all: Vec<&mut ConnectionInfo> = match self {
            Self::Server(info) => vec![info],
            Self::Sentinel(own) => own.sentinels.iter_mut().chain([&mut own.server]).collect(),
            Self::Cluster(seeds) => seeds.iter_mut().collect(),
        };
        for info in all {
            *info = change(info.clone())?;
        }
        Ok(())
    }

    /// Whether any connection uses TLS.
    #[must_use]
    pub fn has_tls(&self) -> bool {
        match self {
            Self::Server(info) => is_tls(info),
            Self::Sentinel(own) => own.sentinels.iter().chain([&own.server]).any(is_tls),
            Self::Cluster(seeds) => seeds.iter().any(is_tls),
        }
    }
}

impl SentinelSettings {
    /// Applies the settings for connections to the sentinels.
    pub(super) fn reach_by(&mut self, access: &SentinelAccess) {
        for info in &mut self.sentinels {
            let mut redis = info.redis_settings().clone();
            if let Some(user) = &access.user {
                redis = redis.set_username(user);
            }
            if let Some(password) = &access.password {
                redis = redis.set_password(password);
            }
            let (host, port) = host_and_port(info);
            let tls = access.tls.unwrap_or_else(|| is_tls(info));
            *info = info.clone().set_redis_settings(redis).set_addr(tcp(host, port, tls));
        }
    }
}

/// Returns the same settings with another address.
pub(super) fn at(info: &ConnectionInfo, host: &str, port: u16) -> ConnectionInfo {
    let addr = match info.addr() {
        ConnectionAddr::TcpTls { insecure, tls_params, .. } => ConnectionAddr::TcpTls {
            host: host.to_owned(),
            port,
            insecure: *insecure,
            tls_params: tls_params.clone(),
        },
        _ => tcp(host.to_owned(), port, false),
    };
    info.clone().set_addr(addr)
}

pub(super) fn host_and_port(info: &ConnectionInfo) -> (String, u16) {
    match info.addr() {
        ConnectionAddr::Tcp(host, port) | ConnectionAddr::TcpTls { host, port, .. } => {
            (host.clone(), *port)
        }
        _ => (String::new(), 0),
    }
}

/// Returns the URL of one server without secrets, for messages.
pub(super) fn address(info: &ConnectionInfo) -> String {
    let address = match info.addr() {
        ConnectionAddr::Tcp(host, port) => format!("redis://{}", joined(host, *port)),
        ConnectionAddr::TcpTls { host, port, .. } => format!("rediss://{}", joined(host, *port)),
        ConnectionAddr::Unix(path) => format!("unix://{}", path.display()),
        _ => "Redis".to_owned(),
    };
    address + &database(info)
}

/// Returns the URL to suggest if a single server turns out to be a node of a cluster.
pub(super) fn cluster_url(info: &ConnectionInfo) -> String {
    format!("{}-cluster://{}", scheme(info), hosts(std::slice::from_ref(info)))
}

/// Returns the URL to suggest if a single server turns out to be a sentinel.
pub(super) fn sentinel_url(info: &ConnectionInfo) -> String {
    format!("{}-sentinel://{}/NAME", scheme(info), hosts(std::slice::from_ref(info)))
}

fn joined(host: &str, port: u16) -> String {
    if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") }
}

fn hosts(all: &[ConnectionInfo]) -> String {
    let host = |info| {
        let (host, port) = host_and_port(info);
        joined(&host, port)
    };
    all.iter().map(host).collect::<Vec<_>>().join(",")
}

fn database(info: &ConnectionInfo) -> String {
    match info.redis_settings().db() {
        0 => String::new(),
        database => format!("/{database}"),
    }
}

fn scheme(info: &ConnectionInfo) -> &'static str {
    if is_tls(info) { "rediss" } else { "redis" }
}

pub(super) fn is_tls(info: &ConnectionInfo) -> bool {
    matches!(info.addr(), ConnectionAddr::TcpTls { .. })
}

fn tcp(host: String, port: u16, tls: bool) -> ConnectionAddr {
    if tls {
        return ConnectionAddr::TcpTls { host, port, insecure: false, tls_params: None };
    }
    ConnectionAddr::Tcp(host, port)
}
