#include "sandbox/root.h"

#include <fcntl.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "common/file.h"
#include "common/strings.h"
#include "sandbox/init/protocol.h"

namespace temper::sandbox {
namespace {

constexpr size_t kTemplatesMax = 16;
// Folders of the template that are ours, whatever a rootfs has there.
constexpr const char* kOurs[] = {"proc", "sys", "dev", "work", "tmp", "temper", "run"};

// Makes the place for a mount of a folder or a file at root + target. A link on the way could lead out of the root.
Status MakePlace(const std::string& root, const std::string& target, bool folder) {
  std::string path = root + target;
  for (size_t at = root.size(); at != std::string::npos; at = path.find('/', at + 1)) {
    struct stat st;
    std::string part = path.substr(0, at);
    if (at > root.size() && lstat(part.c_str(), &st) == 0 && S_ISLNK(st.st_mode)) {
      return InvalidArgument("leads through the link " + part.substr(root.size()));
    }
  }
  RETURN_IF_ERROR(MakeDirs(DirName(path)));
  if (folder) return MakeDirs(path);
  Fd fd(open(path.c_str(), O_CREAT | O_WRONLY | O_CLOEXEC | O_NOFOLLOW, 0644));
  return fd.valid() ? Status::Ok() : ErrnoStatus("place for " + path, errno);
}

// An entry of a root folder: links stay links, folders and files are bound.
Status Show(const std::string& source, const std::string& target) {
  struct stat st;
  if (lstat(source.c_str(), &st) != 0) return ErrnoStatus(source, errno);
  if (S_ISLNK(st.st_mode)) {
    char link[4096];
    ssize_t n = readlink(source.c_str(), link, sizeof link - 1);
    if (n < 0) return ErrnoStatus("readlink " + source, errno);
    link[n] = 0;
    return symlink(link, target.c_str()) == 0 ? Status::Ok() : ErrnoStatus("symlink " + target, errno);
  }
  if (!S_ISDIR(st.st_mode) && !S_ISREG(st.st_mode)) return Status::Ok();
  RETURN_IF_ERROR(MakePlace(DirName(target), "/" + BaseName(target), S_ISDIR(st.st_mode)));
  return BindReadOnly(source, target);
}

Status CheckTarget(const Mount& m) {
  auto bad = [&](const char* why) { return InvalidArgument("mount target '" + m.target + "' " + why); };
  if (m.source.empty() || m.source[0] != '/') return InvalidArgument("mount source '" + m.source + "' is not absolute");
  if (m.target.empty() || m.target[0] != '/') return bad("is not absolute");
  std::vector<std::string> parts = Split(std::string_view(m.target).substr(1), '/');
  for (const std::string& part : parts) {
    if (part.empty() || part == "." || part == "..") return bad("has an empty, '.' or '..' part");
  }
  for (const char* ours : kOurs) {
    if (parts[0] == ours) return bad("is a place of the sandbox itself");
  }
  return Status::Ok();
}

Status MakeDevices(const std::string& dev) {
  struct Node {
    const char* name;
    int minor;
  };
  for (Node node : {Node{"null", 3}, Node{"zero", 5}, Node{"full", 7}, Node{"random", 8}, Node{"urandom", 9}}) {
    std::string path = dev + "/" + node.name;
    if (mknod(path.c_str(), S_IFCHR | 0666, makedev(1, node.minor)) != 0 || chmod(path.c_str(), 0666) != 0) {
      return ErrnoStatus("mknod " + path, errno);
    }
  }
  for (auto [name, target] : {std::pair{"fd", "/proc/self/fd"}, {"stdin", "/proc/self/fd/0"}, {"stdout", "/proc/self/fd/1"},
                              {"stderr", "/proc/self/fd/2"}}) {
    if (symlink(target, (dev + "/" + name).c_str()) != 0) return ErrnoStatus("symlink in /dev", errno);
  }
  return MakeDirs(dev + "/shm");
}

Status MakeEtc(const std::string& etc) {
  RETURN_IF_ERROR(MakeDirs(etc));
  RETURN_IF_ERROR(WriteFile(etc + "/passwd",
                            "root:x:0:0:root:/:/usr/sbin/nologin\nagent:x:1000:1000:agent:/work:/bin/sh\n"
                            "tool:x:1001:1000:tool:/work:/bin/sh\nnobody:x:65534:65534:nobody:/:/usr/sbin/nologin\n"));
  RETURN_IF_ERROR(WriteFile(etc + "/group", "root:x:0:\nwork:x:1000:\nnogroup:x:65534:\n"));
  RETURN_IF_ERROR(WriteFile(etc + "/hosts", "127.0.0.1 localhost sandbox\n"));
  RETURN_IF_ERROR(WriteFile(etc + "/hostname", "sandbox\n"));
  RETURN_IF_ERROR(WriteFile(etc + "/nsswitch.conf", "passwd: files\ngroup: files\nhosts: files\n"));
  RETURN_IF_ERROR(WriteFile(etc + "/resolv.conf", ""));
  // What programs of the host's /usr need to be found: the loader's cache and the links of alternatives (awk, vi…).
  for (const char* name : {"ld.so.cache", "ld.so.conf", "ld.so.conf.d", "alternatives", "localtime", "ssl/certs"}) {
    std::string source = std::string("/etc/") + name;
    if (!Exists(source)) continue;
    RETURN_IF_ERROR(MakeDirs(DirName(etc + "/" + name)));
    RETURN_IF_ERROR(Show(source, etc + "/" + name));
  }
  return Status::Ok();
}

}  // namespace

Status BindReadOnly(const std::string& source, const std::string& target) {
  Fd tree(open_tree(AT_FDCWD, source.c_str(), OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC | AT_RECURSIVE));
  if (!tree.valid()) return ErrnoStatus("mount source " + source, errno);
  mount_attr attr = {};
  attr.attr_set = MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV;
  if (mount_setattr(tree.get(), "", AT_EMPTY_PATH | AT_RECURSIVE, &attr, sizeof attr) != 0) {
    return ErrnoStatus("read-only " + source, errno);
  }
  if (move_mount(tree.get(), "", AT_FDCWD, target.c_str(), MOVE_MOUNT_F_EMPTY_PATH) != 0) {
    return ErrnoStatus("mount " + source + " at " + target, errno);
  }
  return Status::Ok();
}

Result<RootTemplates::Root> RootTemplates::Get(const std::string& rootfs, const std::vector<Mount>& mounts) {
  Root root;
  std::vector<Mount> kept;
  for (const Mount& m : mounts) {
    RETURN_IF_ERROR(CheckTarget(m));
    struct stat st;
    if (stat(m.source.c_str(), &st) != 0) return InvalidArgument("mount source '" + m.source + "' does not exist");
    if (!S_ISDIR(st.st_mode) && !S_ISREG(st.st_mode)) {
      return InvalidArgument("mount source '" + m.source + "' is neither a folder nor a file");
    }
    if (S_ISREG(st.st_mode)) root.of_files.push_back(m);
    kept.push_back(Mount{S_ISREG(st.st_mode) ? "" : m.source, m.target});
  }
  for (Entry& e : entries_) {
    if (e.rootfs == rootfs && e.mounts == kept) {
      e.used = ++clock_;
      root.path = e.path;
      return root;
    }
  }
  if (entries_.size() >= kTemplatesMax) {
    auto oldest = std::min_element(entries_.begin(), entries_.end(), [](auto& a, auto& b) { return a.used < b.used; });
    umount2(oldest->path.c_str(), MNT_DETACH);
    rmdir(oldest->path.c_str());
    entries_.erase(oldest);
  }
  std::string path = base_ + "/" + std::to_string(next_++);
  Status built = Build(path, rootfs, kept);
  if (!built.ok()) {
    umount2(path.c_str(), MNT_DETACH);
    rmdir(path.c_str());
    return built;
  }
  entries_.push_back(Entry{rootfs, kept, path, ++clock_});
  root.path = path;
  return root;
}

Status RootTemplates::Build(const std::string& path, const std::string& rootfs, const std::vector<Mount>& mounts) {
  RETURN_IF_ERROR(MakeDirs(path));
  if (mount("temper", path.c_str(), "tmpfs", MS_NOSUID, "mode=0755,size=16m,nr_inodes=4096") != 0) {
    return ErrnoStatus("mount tmpfs at " + path, errno);
  }
  for (const char* name : kOurs) RETURN_IF_ERROR(MakeDirs(path + "/" + name));
  RETURN_IF_ERROR(MakeDirs(path + "/temper/disk"));
  RETURN_IF_ERROR(MakeDevices(path + "/dev"));

  std::string source = rootfs.empty() ? "/" : rootfs;
  std::vector<std::string> names;
  if (rootfs.empty()) {
    names = {"usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32"};
    RETURN_IF_ERROR(MakeEtc(path + "/etc"));
  } else {
    if (!IsDirectory(rootfs)) return InvalidArgument("rootfs '" + rootfs + "' is not a folder");
    ASSIGN_OR_RETURN(names, ListDir(rootfs));
  }
  for (const std::string& name : names) {
    if (std::find(std::begin(kOurs), std::end(kOurs), name) != std::end(kOurs)) continue;
    struct stat st;
    if (lstat((source + "/" + name).c_str(), &st) != 0) continue;
    RETURN_IF_ERROR(Show(source + "/" + name, path + "/" + name));
  }
  for (const Mount& m : mounts) {
    Status place = MakePlace(path, m.target, !m.source.empty());
    if (!place.ok()) return InvalidArgument("mount target '" + m.target + "': " + place.message());
    if (!m.source.empty()) RETURN_IF_ERROR(BindReadOnly(m.source, path + m.target));
  }

  RETURN_IF_ERROR(WriteFile(path + protocol::kInitPath, init_));
  if (chmod((path + protocol::kInitPath).c_str(), 0555) != 0 ||
      symlink("init", (path + protocol::kToolExecPath).c_str()) != 0) {
    return ErrnoStatus("init in the sandbox root", errno);
  }
  mount_attr attr = {};
  attr.attr_set = MOUNT_ATTR_RDONLY;
  if (mount_setattr(AT_FDCWD, path.c_str(), 0, &attr, sizeof attr) != 0) return ErrnoStatus("read-only root", errno);
  return Status::Ok();
}

}  // namespace temper::sandbox
