//! The kinds of Redis deployments: one server, a primary behind sentinels, or the nodes of a cluster.

use std::fmt;
use std::path::PathBuf;

/// A deployment of Redis.
///
/// It is displayed as a URL without user, password and parameters.
///
/// ```
/// use leasehold::url::{Deployment, StoreUrl};
///
/// let store = StoreUrl::parse("redis-cluster://:secret@node1,node2:7000")?;
/// let StoreUrl::Redis(Deployment::Cluster(nodes)) = store else { unreachable!() };
/// assert_eq!(nodes[1].host_and_port(), ("node2".to_owned(), 7000));
/// assert_eq!(nodes[1].password.as_deref(), Some("secret"));
/// # Ok::<(), leasehold::Error>(())
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Deployment {
    /// One server.
    Server(ServerSettings),
    /// A primary that sentinels name.
    Sentinel(SentinelSettings),
    /// Some nodes of a cluster, from which the client gets the others.
    Cluster(Vec<ServerSettings>),
}

/// The sentinels that monitor a primary.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct SentinelSettings {
    /// The sentinels in the URL.
    pub sentinels: Vec<ServerSettings>,
    /// The name of the primary in the sentinels' configuration.
    pub service: String,
    /// How to connect to the primary, except for its address, which the sentinels name.
    pub server: ServerSettings,
}

/// How to connect to one server.
///
/// It is displayed as a URL without user, password and parameters.
#[derive(Clone)]
#[non_exhaustive]
pub struct ServerSettings {
    /// The server's address.
    pub endpoint: Endpoint,
    /// The user, if it is not the default user.
    pub user: Option<String>,
    /// The password.
    pub password: Option<String>,
    /// The number of the database.
    pub database: u64,
}

/// The address of a server.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Endpoint {
    /// A host and a port.
    Tcp {
        /// The name or the IP address of the host.
        host: String,
        /// The port.
        port: u16,
        /// Whether the server speaks TLS.
        tls: bool,
    },
    /// The path of a Unix socket.
    Unix(PathBuf),
}

/// Without the password.
impl fmt::Debug for ServerSettings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ServerSettings({self})")
    }
}

/// How to connect to the sentinels, where that differs from the server.
#[derive(Clone, Default, PartialEq)]
pub(crate) struct SentinelAccess {
    pub(crate) user: Option<String>,
    pub(crate) password: Option<String>,
    pub(crate) tls: Option<bool>,
}

impl Deployment {
    /// Whether any connection uses TLS.
    #[must_use]
    pub fn has_tls(&self) -> bool {
        match self {
            Self::Server(server) => server.uses_tls(),
            Self::Sentinel(SentinelSettings { sentinels, server, .. }) => {
                sentinels.iter().chain([server]).any(ServerSettings::uses_tls)
            }
            Self::Cluster(seeds) => seeds.iter().any(ServerSettings::uses_tls),
        }
    }
}

impl fmt::Display for Deployment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Server(server) => server.fmt(f),
            Self::Sentinel(SentinelSettings { sentinels, service, server }) => {
                let (scheme, hosts) = (server.scheme(), hosts(sentinels));
                write!(f, "{scheme}-sentinel://{hosts}/{service}{}", server.database_path())
            }
            Self::Cluster(seeds) => {
                let scheme = seeds.first().map_or("redis", ServerSettings::scheme);
                write!(f, "{scheme}-cluster://{}", hosts(seeds))
            }
        }
    }
}

impl SentinelSettings {
    /// Applies the settings for connections to the sentinels.
    pub(crate) fn reach_by(&mut self, access: &SentinelAccess) {
        for sentinel in &mut self.sentinels {
            if access.user.is_some() {
                sentinel.user.clone_from(&access.user);
            }
            if access.password.is_some() {
                sentinel.password.clone_from(&access.password);
            }
            if let (Some(use_tls), Endpoint::Tcp { tls, .. }) = (access.tls, &mut sentinel.endpoint)
            {
                *tls = use_tls;
            }
        }
    }
}

impl fmt::Display for ServerSettings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.endpoint {
            Endpoint::Tcp { host, port, .. } => {
                write!(f, "{}://{}", self.scheme(), joined(host, *port))?;
            }
            Endpoint::Unix(path) => write!(f, "unix://{}", path.display())?,
        }
        f.write_str(&self.database_path())
    }
}

impl ServerSettings {
    /// Returns the same settings with another address.
    #[must_use]
    pub fn at(&self, host: &str, port: u16) -> Self {
        let endpoint = Endpoint::Tcp { host: host.to_owned(), port, tls: self.uses_tls() };
        Self { endpoint, ..self.clone() }
    }

    /// Returns the host and the port, or an empty host and port 0 for a Unix socket.
    #[must_use]
    pub fn host_and_port(&self) -> (String, u16) {
        match &self.endpoint {
            Endpoint::Tcp { host, port, .. } => (host.clone(), *port),
            Endpoint::Unix(_) => (String::new(), 0),
        }
    }

    /// Whether the server speaks TLS.
    #[must_use]
    pub fn uses_tls(&self) -> bool {
        matches!(self.endpoint, Endpoint::Tcp { tls: true, .. })
    }

    /// Returns the URL to suggest if a single server turns out to be a node of a cluster.
    pub(crate) fn cluster_url(&self) -> String {
        format!("{}-cluster://{}", self.scheme(), hosts(std::slice::from_ref(self)))
    }

    /// Returns the URL to suggest if a single server turns out to be a sentinel.
    pub(crate) fn sentinel_url(&self) -> String {
        format!("{}-sentinel://{}/NAME", self.scheme(), hosts(std::slice::from_ref(self)))
    }

    fn database_path(&self) -> String {
        match self.database {
            0 => String::new(),
            database => format!("/{database}"),
        }
    }

    fn scheme(&self) -> &'static str {
        if self.uses_tls() { "rediss" } else { "redis" }
    }
}

fn joined(host: &str, port: u16) -> String {
    if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") }
}

fn hosts(all: &[ServerSettings]) -> String {
    let host = |server: &ServerSettings| {
        let (host, port) = server.host_and_port();
        joined(&host, port)
    };
    all.iter().map(host).collect::<Vec<_>>().join(",")
}
