/* netdelay LINK TAP DELAY_US [MBIT_PER_S]
 *
 * A slow wire, for kernels without netem. Carries Ethernet frames between a link and a TAP device that it makes, both
 * ways, each DELAY_US after it came, and at no more than MBIT_PER_S if that is given. Prints "ready" when it carries;
 * ends with its standard input.
 *
 *     LINK --read--> queue: leaves the rate's bottleneck, then due DELAY_US later --write--> TAP, and back alike
 *
 * Frames keep their virtio header, so that segmentation offload works through it: one read may be 64 KiB of TCP.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/if_packet.h>
#include <linux/if_tun.h>
#include <net/ethernet.h>
#include <net/if.h>
#include <poll.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { HEADER = 10, LARGEST = 70000, SLOTS = 8192, BATCH = 64 };
static const int64_t QUEUE_BYTES = 16 << 20; /* what a switch's buffer holds; more is dropped */
static const int64_t RETRY_NS = 20000;

struct frame {
    int64_t due_ns;
    size_t size;
    char *bytes;
};

struct direction {
    int from, to;
    struct frame slots[SLOTS];
    unsigned head, tail; /* head: the next to deliver; both count up for ever */
    int64_t bytes, free_at_ns;
};

static int64_t delay_ns, bits_per_us;

static void fail(const char *what) {
    perror(what);
    exit(1);
}

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

static int open_link(const char *name) {
    int link = socket(AF_PACKET, SOCK_RAW | SOCK_NONBLOCK, htons(ETH_P_ALL));
    if (link < 0) fail("packet socket");
    int on = 1, buffer = 64 << 20;
    if (setsockopt(link, SOL_PACKET, PACKET_VNET_HDR, &on, sizeof on)) fail("PACKET_VNET_HDR");
    if (setsockopt(link, SOL_PACKET, PACKET_IGNORE_OUTGOING, &on, sizeof on)) fail("PACKET_IGNORE_OUTGOING");
    setsockopt(link, SOL_SOCKET, SO_RCVBUFFORCE, &buffer, sizeof buffer);
    setsockopt(link, SOL_SOCKET, SO_SNDBUFFORCE, &buffer, sizeof buffer);
    struct sockaddr_ll address = {
        .sll_family = AF_PACKET, .sll_protocol = htons(ETH_P_ALL), .sll_ifindex = if_nametoindex(name)};
    if (!address.sll_ifindex) fail(name);
    if (bind(link, (struct sockaddr *)&address, sizeof address)) fail("bind");
    struct packet_mreq all = {.mr_ifindex = address.sll_ifindex, .mr_type = PACKET_MR_PROMISC};
    if (setsockopt(link, SOL_PACKET, PACKET_ADD_MEMBERSHIP, &all, sizeof all)) fail("promiscuous");
    return link;
}

static int open_tap(const char *name) {
    int tap = open("/dev/net/tun", O_RDWR | O_NONBLOCK), header = HEADER;
    if (tap < 0) fail("/dev/net/tun");
    struct ifreq wanted = {.ifr_flags = IFF_TAP | IFF_NO_PI | IFF_VNET_HDR};
    strncpy(wanted.ifr_name, name, IFNAMSIZ - 1);
    if (ioctl(tap, TUNSETIFF, &wanted)) fail("TUNSETIFF");
    if (ioctl(tap, TUNSETVNETHDRSZ, &header)) fail("TUNSETVNETHDRSZ");
    if (ioctl(tap, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4 | TUN_F_TSO6)) fail("TUNSETOFFLOAD");
    return tap;
}

static void take(struct direction *way) {
    static char bytes[LARGEST];
    for (int count = 0; count < BATCH; count++) {
        ssize_t size = read(way->from, bytes, sizeof bytes);
        if (size <= HEADER) return;
        if (way->tail - way->head == SLOTS || way->bytes + size > QUEUE_BYTES) continue;
        int64_t now = now_ns();
        if (way->free_at_ns < now) way->free_at_ns = now;
        if (bits_per_us) way->free_at_ns += (size - HEADER) * 8 * 1000 / bits_per_us;
        struct frame *frame = &way->slots[way->tail++ % SLOTS];
        *frame = (struct frame){way->free_at_ns + delay_ns, (size_t)size, malloc((size_t)size)};
        if (!frame->bytes) fail("malloc");
        memcpy(frame->bytes, bytes, (size_t)size);
        way->bytes += size;
    }
}

/* Returns when the next frame is due; 0 if none waits. */
static int64_t deliver(struct direction *way) {
    while (way->head != way->tail) {
        struct frame *frame = &way->slots[way->head % SLOTS];
        int64_t now = now_ns();
        if (frame->due_ns > now) return frame->due_ns;
        if (write(way->to, frame->bytes, frame->size) < 0 && (errno == EAGAIN || errno == ENOBUFS)) return now + RETRY_NS;
        free(frame->bytes);
        way->bytes -= (int64_t)frame->size;
        way->head++;
    }
    return 0;
}

int main(int count, char **words) {
    if (count < 4) {
        fprintf(stderr, "usage: netdelay LINK TAP DELAY_US [MBIT_PER_S]\n");
        return 2;
    }
    delay_ns = atoll(words[3]) * 1000;
    bits_per_us = count > 4 ? atoll(words[4]) : 0;
    int link = open_link(words[1]), tap = open_tap(words[2]);
    static struct direction ways[2];
    ways[0].from = ways[1].to = link;
    ways[0].to = ways[1].from = tap;
    puts("ready");
    fflush(stdout);
    for (;;) {
        int64_t next = 0;
        for (int way = 0; way < 2; way++) {
            int64_t due = deliver(&ways[way]);
            if (due && (!next || due < next)) next = due;
        }
        int64_t wait = next ? next - now_ns() : 0;
        if (wait < 0) wait = 0;
        struct timespec until = {wait / 1000000000, wait % 1000000000};
        struct pollfd heard[3] = {{link, POLLIN, 0}, {tap, POLLIN, 0}, {STDIN_FILENO, POLLIN, 0}};
        if (ppoll(heard, 3, next ? &until : NULL, NULL) < 0 && errno != EINTR) fail("ppoll");
        if (heard[2].revents) return 0;
        for (int way = 0; way < 2; way++)
            if (heard[way].revents & POLLIN) take(&ways[way]);
    }
}
