//! Certificates for servers that use TLS, made for each test.

use std::fs;
use std::path::Path;

use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair, KeyUsagePurpose,
};

/// A certificate for loopback, and the authority that signed it and no other certificate.
///
/// The nodes of a cluster share one, because each node verifies the certificates of the others.
#[derive(Debug)]
pub(crate) struct Certificate {
    /// The authority's certificate: what a client has to trust.
    pub(super) authority: String,
    signed: String,
    key: String,
}

impl Certificate {
    pub(crate) fn make() -> Self {
        let names = ["localhost".to_owned(), "127.0.0.1".to_owned()];
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.distinguished_name.push(DnType::CommonName, "the authority of one test");
        params.key_usages.push(KeyUsagePurpose::KeyCertSign);
        let key = KeyPair::generate().expect("random numbers");
        let authority = CertifiedIssuer::self_signed(params, key).expect("a key that signs");

        let key = KeyPair::generate().expect("random numbers");
        let certificate = CertificateParams::new(names)
            .and_then(|params| params.signed_by(&key, &authority))
            .expect("names that a certificate can hold");
        Self { authority: authority.pem(), signed: certificate.pem(), key: key.serialize_pem() }
    }

    /// Writes the files into `dir`, and returns the options of a server that listens for TLS on
    /// `port`, and for nothing else on TCP. Its replication and its cluster bus use TLS as well.
    pub(super) fn args(&self, port: u16, dir: &Path) -> Vec<String> {
        let write = |name: &str, pem: &str| {
            let file = dir.join(name);
            fs::write(&file, pem).expect("a writable directory");
            file.display().to_string()
        };
        let authority = write("authority.crt", &self.authority);
        let certificate = write("server.crt", &self.signed);
        let (port, key) = (port.to_string(), write("server.key", &self.key));
        let listen = ["--port", "0", "--tls-port", &port, "--tls-auth-clients", "no"];
        let peers = ["--tls-replication", "yes", "--tls-cluster", "yes"];
        let files = ["--tls-cert-file", &certificate, "--tls-key-file", &key];
        let trust = ["--tls-ca-cert-file", authority.as_str()];
        let all = listen.into_iter().chain(peers).chain(files).chain(trust);
        all.map(str::to_owned).collect()
    }
}
